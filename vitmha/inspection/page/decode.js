"use strict";
// Decodes what storage.py packs. `data` holds the arrays of one image by name, with the heads of all layers along the first
// axis; token indices count the prefix tokens, then the patches row by row. Nothing here needs a browser.

const POOLED = -1; // the query that is the mean over the rows of all patches

/** The sections of a base64 blob as typed arrays by name; `width` holds the length of each one's last axis. */
function decodeBlob(text, sections) {
  const content = atob(text), bytes = new Uint8Array(content.length);
  for (let i = 0; i < content.length; i++) bytes[i] = content.charCodeAt(i);
  const types = { u1: Uint8Array, i1: Int8Array, f4: Float32Array };
  const data = { width: {} };
  for (const [name, { offset, dtype, shape }] of Object.entries(sections)) {
    data[name] = new types[dtype](bytes.buffer, offset, shape.reduce((a, b) => a * b, 1));
    data.width[name] = shape[shape.length - 1];
  }
  return data;
}

/** Dot products of one token's vector with those of all tokens, from two int8 arrays with scales. */
function products(data, first, second, head, query, tokens) {
  const width = data.width[first], a = data[first], b = data[second];
  const start = (head * tokens + query) * width, scale = data[`${first}_scale`][head * tokens + query];
  const result = new Float64Array(tokens);
  for (let j = 0; j < tokens; j++) {
    const offset = (head * tokens + j) * width;
    let sum = 0;
    for (let i = 0; i < width; i++) sum += a[start + i] * b[offset + i];
    result[j] = sum * scale * data[`${second}_scale`][head * tokens + j];
  }
  return result;
}

/** One row quantized by `quantize_rows`: the square root of each weight relative to the maximum of the row. */
function dequantizedRow(data, index, tokens) {
  const levels = data.maps, maximum = data.maxima[index];
  return Float64Array.from({ length: tokens }, (_, j) => (levels[index * tokens + j] / 255) ** 2 * maximum);
}

function softmax(scores) {
  const highest = scores.reduce((a, b) => Math.max(a, b));
  const exponentials = scores.map((score) => Math.exp(score - highest));
  const sum = exponentials.reduce((a, b) => a + b);
  return exponentials.map((value) => value / sum);
}

/** The attention row of a query in a head; it sums to 1. */
function attentionRow(data, head, query, tokens) {
  if (query === POOLED) return data.pooled.subarray(head * tokens, (head + 1) * tokens);
  if (data.maps) return dequantizedRow(data, head * tokens + query, tokens);
  return softmax(products(data, "q", "k", head, query, tokens));
}

/** (weight * gradient)+ of a query in a head. */
function relevanceRow(data, head, query, tokens) {
  if (query === POOLED) return data.pooled_relevance.subarray(head * tokens, (head + 1) * tokens);
  const weights = attentionRow(data, head, query, tokens);
  return products(data, "left", "right", head, query, tokens).map((gradient, j) => Math.max(0, gradient * weights[j]));
}
