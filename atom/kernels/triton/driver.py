"""Triton's driver, which is not for several threads at a time until it is there.

load_driver()
"""

from triton.runtime import driver


def load_driver() -> None:
    driver.active.get_current_target()
