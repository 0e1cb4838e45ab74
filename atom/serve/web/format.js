/** Write numbers with their units. */

const short = value => value >= 100 ? Math.round(value) : +value.toPrecision(3);
export const seconds = value => value >= 1 ? `${short(value)} s` : `${short(value * 1000)} ms`;
export const count = value => value >= 10000 ? `${short(value / 1000)}k` : `${short(value)}`;
export const percent = value => `${short(value * 100)} %`;
export const tokens = number => `${number} token${number === 1 ? "" : "s"}`;
