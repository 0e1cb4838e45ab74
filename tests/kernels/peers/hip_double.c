// A double of AMD's runtime for tests: what it gives and takes is declared as in hip/hip_runtime_api.h, and memory of a "GPU" is a
// file that other processes map. Errors are those of the documentation: hipErrorInvalidValue is 1, hipErrorOutOfMemory 2.
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int hipError_t;
typedef struct hipIpcMemHandle_st { char reserved[64]; } hipIpcMemHandle_t;
#define hipIpcMemLazyEnablePeerAccess 0x01
#define hipDeviceMallocUncached 0x3

static struct { void *address; size_t size; char path[64]; int is_open; } known[16];
static int count, number;

static int find(void *address) {
  for (int at = 0; at < count; at++)
    if (known[at].address == address) return at;
  return -1;
}

static hipError_t map(void **ptr, const char *path, size_t size, int is_open) {
  int file = open(path, O_RDWR | O_CREAT, 0600);
  if (file < 0) return 1;
  if (!is_open && ftruncate(file, size)) return 2;
  if (is_open) size = lseek(file, 0, SEEK_END);
  *ptr = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (*ptr == MAP_FAILED) return 2;
  known[count].address = *ptr, known[count].size = size, known[count].is_open = is_open;
  strcpy(known[count++].path, path);
  return 0;
}

hipError_t hipExtMallocWithFlags(void **ptr, size_t sizeBytes, unsigned int flags) {
  char path[64];
  if (flags != hipDeviceMallocUncached) return 1;
  if (sizeBytes > (1ull << 40)) return 2;
  snprintf(path, sizeof path, "/tmp/hip-double-%d-%d", getpid(), number++);
  hipError_t result = map(ptr, path, sizeBytes, 0);
  if (!result) memset(*ptr, 0x5a, sizeBytes);  // as memory of a GPU: not zeros
  return result;
}

hipError_t hipMemset(void *dst, int value, size_t sizeBytes) {
  if (find(dst) < 0) return 1;
  memset(dst, value, sizeBytes);
  return 0;
}

hipError_t hipIpcGetMemHandle(hipIpcMemHandle_t *handle, void *devPtr) {
  int at = find(devPtr);
  if (at < 0 || known[at].is_open) return 1;
  memset(handle->reserved, 0, 64);
  strcpy(handle->reserved, known[at].path);
  handle->reserved[63] = 42;
  return 0;
}

hipError_t hipIpcOpenMemHandle(void **devPtr, hipIpcMemHandle_t handle, unsigned int flags) {
  if (flags != hipIpcMemLazyEnablePeerAccess || handle.reserved[63] != 42) return 1;
  return map(devPtr, handle.reserved, 0, 1);
}

static hipError_t drop(void *address, int is_open) {
  int at = find(address);
  if (at < 0 || known[at].is_open != is_open) return 1;
  munmap(address, known[at].size);
  if (!is_open) unlink(known[at].path);
  known[at].address = 0;
  return 0;
}

hipError_t hipIpcCloseMemHandle(void *devPtr) { return drop(devPtr, 1); }

hipError_t hipFree(void *ptr) { return drop(ptr, 0); }

int num_held(void) {
  int held = 0;
  for (int at = 0; at < count; at++) held += known[at].address != 0;
  return held;
}

const char *hipGetErrorString(hipError_t hipError) { return hipError == 1 ? "invalid argument" : "out of memory"; }
