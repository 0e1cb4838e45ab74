/** Read the server's metrics, and what has changed between two samples of them. */

/** Our metrics in Prometheus' text, models and engines added up: a sum by name, histograms' cumulative buckets as [bound, count]. */
export function parseMetrics(text) {
  const sums = new Map(), buckets = new Map();
  for (const line of text.split("\n")) {
    const [, name, labels, value] = /^atom:(\w+)(?:\{(.*)\})? (\S+)$/.exec(line) ?? [];
    if (!name) continue;
    const bound = /(?:^|,)le="([^"]+)"/.exec(labels ?? "")?.[1];
    if (bound === undefined) sums.set(name, (sums.get(name) ?? 0) + Number(value));
    else {
      const counts = buckets.get(name) ?? new Map(), key = bound === "+Inf" ? Infinity : Number(bound);
      buckets.set(name, counts.set(key, (counts.get(key) ?? 0) + Number(value)));
    }
  }
  return {sums, buckets: new Map([...buckets].map(([name, counts]) => [name, [...counts]]))};
}

/** What has changed between two samples. */
export class Change {
  constructor(then, now) { Object.assign(this, {then, now}); }
  value(name) { return this.now.sums.get(name) ?? null; }
  growth(name) { return (this.now.sums.get(name) ?? 0) - (this.then.sums.get(name) ?? 0); }
  rate(name) { return this.growth(name) / (this.now.time - this.then.time); }
  share(part, whole) { return this.growth(whole) ? this.growth(part) / this.growth(whole) : null; }
  mean(name) { return this.growth(`${name}_count`) ? this.growth(`${name}_sum`) / this.growth(`${name}_count`) : null; }

  /** A quantile, as Prometheus' histogram_quantile has it; null if there are too few samples to distinguish it from the maximum. */
  quantile(name, share) {
    const now = this.now.buckets.get(`${name}_bucket`) ?? [], then = this.then.buckets.get(`${name}_bucket`) ?? [];
    const counts = now.map(([, number], index) => number - (then[index]?.[1] ?? 0));
    const wanted = share * (counts.at(-1) ?? 0), index = counts.findIndex(number => number >= wanted);
    if (!wanted || counts.at(-1) * (1 - share) < 0.999) return null;
    const lower = index ? now[index - 1][0] : 0, below = index ? counts[index - 1] : 0, upper = now[index][0];
    return upper === Infinity ? lower : lower + (upper - lower) * (wanted - below) / (counts[index] - below);
  }
}
