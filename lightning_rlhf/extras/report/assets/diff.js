"use strict";
/** Which tokens of two responses are equal, by the algorithm of Myers. */
(() => {
  const MOST_CHANGES = 1000;  // beyond it the best path so far is kept, so that time and memory are bounded
  const cache = new WeakMap();

  /** [found, found of others]: whether each text is part of a common subsequence of both, in order. */
  function matches(texts, others) {
    const numbers = new Map(), number = (text) => numbers.get(text) ?? numbers.set(text, numbers.size).get(text);
    const a = Int32Array.from(texts, number), b = Int32Array.from(others, number);
    const found = [new Array(a.length).fill(false), new Array(b.length).fill(false)];
    const keep = (i, j, count) => { found[0].fill(true, i, i + count); found[1].fill(true, j, j + count); };
    let start = 0, ends = 0;
    while (start < Math.min(a.length, b.length) && a[start] === b[start]) start++;
    while (ends < Math.min(a.length, b.length) - start && a.at(-1 - ends) === b.at(-1 - ends)) ends++;
    keep(0, 0, start);
    keep(a.length - ends, b.length - ends, ends);
    let i = start, j = start;
    while (i < a.length - ends && j < b.length - ends) [i, j] = advance(a.subarray(i, a.length - ends), b.subarray(j, b.length - ends), i, j, keep);
    return found;
  }

  /** Keeps what is equal on the shortest path from the beginning, and returns its end: that of both, or the furthest. */
  function advance(a, b, offsetA, offsetB, keep) {
    const middle = MOST_CHANGES + 1, reach = new Int32Array(2 * middle + 1), history = [];
    let best = 0, furthest = -1;
    for (let changes = 0; changes <= MOST_CHANGES; changes++) {
      history.push(reach.slice(middle - changes, middle + changes + 1));
      furthest = -1;
      for (let k = -changes; k <= changes; k += 2) {
        const isDown = k === -changes || (k !== changes && reach[middle + k - 1] < reach[middle + k + 1]);
        let x = isDown ? reach[middle + k + 1] : reach[middle + k - 1] + 1;
        while (x < a.length && x - k < b.length && a[x] === b[x - k]) x++;
        reach[middle + k] = x;
        if (x <= a.length && x - k <= b.length && 2 * x - k > furthest) { furthest = 2 * x - k; best = k; }
      }
      if (furthest === a.length + b.length) break;
    }
    let x = reach[middle + best], k = best;
    const end = [offsetA + x, offsetB + x - k];
    for (let changes = history.length - 1; changes >= 0; changes--) {
      const before = history[changes], at = (own) => before[own + changes] ?? 0;
      const isDown = k === -changes || (k !== changes && at(k - 1) < at(k + 1));
      const first = changes === 0 ? 0 : isDown ? at(k + 1) : at(k - 1) + 1;
      keep(offsetA + first, offsetB + first - k, x - first);
      if (changes === 0) break;
      k = isDown ? k + 1 : k - 1;
      x = at(k);
    }
    return end;
  }

  /** As matches, for the tokens of two rows; the same rows are compared once. */
  function comparison(row, other) {
    if (!cache.has(row)) cache.set(row, new WeakMap());
    const known = cache.get(row);
    if (!known.has(other)) {
      const [own, others] = matches(row.tokens.texts, other.tokens.texts);
      known.set(other, own);
      if (!cache.has(other)) cache.set(other, new WeakMap());
      cache.get(other).set(row, others);
    }
    return known.get(other);
  }

  Object.assign(window.report, { matches, comparison });
})();
