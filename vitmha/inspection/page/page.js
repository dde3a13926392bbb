"use strict";
// The page of page.py. f counts the heads of all layers; tokens are the prefix tokens, then the patches row by row.

const facts = JSON.parse(document.getElementById("facts").textContent);
const { layout, numbers } = facts;
const [gridHeight, gridWidth] = layout.grid_size;
const [patchHeight, patchWidth] = layout.patch_size;
const tokens = layout.num_tokens, prefix = layout.num_prefix_tokens, patches = tokens - prefix;
const POOLED = -1; // the query that is the mean over the rows of all patches
const reader = facts.reader === "class" ? 0 : POOLED;
const state = { picture: 0, query: reader, head: 0, off: "on", view: "raw", epoch: null, hover: null };
const get = (id) => document.getElementById(id);

// ---- what is stored

const opened = new Map();

/** The arrays of a blob by name, decoded when first asked for. */
function open(blob) {
  if (!opened.has(blob.number)) {
    const text = atob(get(`blob-${blob.number}`).textContent);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    const kinds = { u1: Uint8Array, i1: Int8Array, f4: Float32Array };
    const arrays = { width: {} };
    for (const [name, { at, kind, shape }] of Object.entries(blob.sections)) {
      arrays[name] = new kinds[kind](bytes.buffer, at, shape.reduce((a, b) => a * b, 1));
      arrays.width[name] = shape[shape.length - 1];
    }
    opened.set(blob.number, arrays);
  }
  return opened.get(blob.number);
}

/** The products of one token's vector with those of all, as two arrays of bytes with scales hold them. */
function products(data, first, second, head, query) {
  const width = data.width[first], one = data[first], many = data[second];
  const start = (head * tokens + query) * width, scale = data[`${first}_scale`][head * tokens + query];
  const result = new Float64Array(tokens);
  for (let j = 0; j < tokens; j++) {
    const at = (head * tokens + j) * width;
    let sum = 0;
    for (let i = 0; i < width; i++) sum += one[start + i] * many[at + i];
    result[j] = sum * scale * data[`${second}_scale`][head * tokens + j];
  }
  return result;
}

const unpacked = (levels, at, top) => Float64Array.from({ length: tokens }, (_, j) => (levels[at + j] / 255) ** 2 * top);

/** One attention row: what the query looks at in a head; sums to 1. */
function row(data, head, query) {
  if (query === POOLED) return data.pooled.subarray(head * tokens, (head + 1) * tokens);
  const place = head * tokens + query;
  if (data.maps) return unpacked(data.maps, place * tokens, data.tops[place]);
  const scores = products(data, "q", "k", head, query);
  const top = scores.reduce((a, b) => Math.max(a, b));
  let sum = 0;
  for (let j = 0; j < tokens; j++) sum += scores[j] = Math.exp(scores[j] - top);
  return scores.map((value) => value / sum);
}

/** What is shown of a head: weights, or what the view makes of them. */
function values(head, view = state.view) {
  const picture = facts.pictures[state.picture], query = state.query;
  if (state.epoch !== null) {
    const data = open(facts.epochs.blob);
    const place = (state.epoch * facts.pictures.length + state.picture) * numbers.length + head;
    return unpacked(data.maps, place * tokens, data.tops[place]);
  }
  const data = open(picture.blob);
  if (view === "relevance") {
    if (query === POOLED) return data.pooled_relevance.subarray(head * tokens, (head + 1) * tokens);
    const weights = row(data, head, query);
    return products(data, "left", "right", head, query).map((gradient, j) => Math.max(0, gradient * weights[j]));
  }
  const weights = row(data, head, query);
  if (view === "value") return weights.map((weight, j) => weight * data.norms[head * tokens + j]);
  if (view === "raw") return weights;
  const partner = get("partner").checked ? facts.against.partner[head] : head;
  const second = row(open(picture.other), partner, query);
  return view === "second" ? second : second.map((weight, j) => weight - weights[j]);
}

// ---- colours

const DARK_TO_LIGHT = [[0, 0, 4], [40, 17, 89], [114, 31, 129], [182, 54, 122], [241, 96, 93], [254, 175, 119], [252, 253, 191]];
const BLUE_TO_RED = [[33, 102, 172], [146, 197, 222], [247, 247, 247], [244, 165, 130], [178, 24, 43]];
const isSigned = () => state.view === "difference" && state.epoch === null;

/** A colour for a share of the scale: 0 to 1, or -1 to 1 of signed values. */
function colour(share) {
  const stops = isSigned() ? BLUE_TO_RED : DARK_TO_LIGHT;
  const place = Math.min(1, Math.max(0, isSigned() ? (share + 1) / 2 : share)) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  return stops[low].map((from, i) => Math.round(from + (stops[low + 1][i] - from) * (place - low)));
}

/** The value that the scale ends at. */
function topOf(some) {
  const sizes = Float64Array.from(some, Math.abs).sort();
  const last = get("clip").checked ? Math.floor(0.98 * (sizes.length - 1)) : sizes.length - 1;
  return sizes[last] || 1e-12;
}

const onGrid = (all) => all.slice(prefix);

function paint(canvas, shown, top) {
  canvas.width = gridWidth;
  canvas.height = gridHeight;
  const context = canvas.getContext("2d"), pixels = context.createImageData(gridWidth, gridHeight);
  for (let i = 0; i < patches; i++) pixels.data.set([...colour(shown[i] / top), 255], 4 * i);
  context.putImageData(pixels, 0, 0);
}

// ---- words

const percent = (share) => `${100 * share < 0.1 ? (100 * share).toFixed(3) : (100 * share).toPrecision(3)} %`;
const short = (value) => (value === null ? "-" : Number(value.toPrecision(3)).toString());
const nameOf = (f) => `layer ${numbers[f].layer} head ${numbers[f].head}`;

function tokenName(token) {
  if (token === POOLED) return "mean over all patches";
  if (token < layout.num_class_tokens) return "class token";
  if (token < layout.num_class_tokens + layout.num_distillation_tokens) return "distillation token";
  if (token < prefix) return `register ${token - layout.num_class_tokens - layout.num_distillation_tokens}`;
  const patch = token - prefix;
  return `patch at row ${Math.floor(patch / gridWidth)}, column ${patch % gridWidth}`;
}

const sum = (some) => some.reduce((a, b) => a + b, 0);

// ---- drawing

let current = []; // what is shown of every head
let tops = []; // where each head's scale ends

const image = new Image();

function drawStage() {
  const canvas = get("stage"), scale = Math.max(1, Math.round(560 / (gridWidth * patchWidth)));
  canvas.width = gridWidth * patchWidth * scale;
  canvas.height = gridHeight * patchHeight * scale;
  const context = canvas.getContext("2d");
  const [height, width] = [patchHeight * scale, patchWidth * scale];
  context.imageSmoothingEnabled = false;
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  context.strokeStyle = "rgba(255,255,255,.28)";
  context.lineWidth = 1;
  context.beginPath();
  for (let i = 1; i < gridWidth; i++) { context.moveTo(i * width, 0); context.lineTo(i * width, canvas.height); }
  for (let i = 1; i < gridHeight; i++) { context.moveTo(0, i * height); context.lineTo(canvas.width, i * height); }
  context.stroke();
  if (state.query >= prefix) frame(context, state.query, width, height);
}

function frame(context, token, width, height, dashes = []) {
  const x = ((token - prefix) % gridWidth) * width, y = Math.floor((token - prefix) / gridWidth) * height;
  context.setLineDash(dashes);
  for (const [style, line] of [["#000", 6], ["#fff", 3]]) {
    context.strokeStyle = style;
    context.lineWidth = line;
    context.strokeRect(x + 2, y + 2, width - 4, height - 4);
  }
}

function drawLarge() {
  const canvas = get("large"), stage = get("stage");
  [canvas.width, canvas.height] = [stage.width, stage.height];
  const context = canvas.getContext("2d"), width = canvas.width / gridWidth, height = canvas.height / gridHeight;
  const shown = onGrid(current[state.head]), top = tops[state.head];
  context.imageSmoothingEnabled = false;
  context.filter = "grayscale(1)";
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  context.filter = "none";
  for (let i = 0; i < patches; i++) {
    const share = shown[i] / top;
    context.globalAlpha = 0.62 + 0.3 * Math.min(1, Math.abs(share));
    context.fillStyle = `rgb(${colour(share)})`;
    context.fillRect((i % gridWidth) * width, Math.floor(i / gridWidth) * height, width, height);
  }
  context.globalAlpha = 1;
  if (state.query >= prefix) frame(context, state.query, width, height);
  if (state.hover !== null) frame(context, state.hover, width, height, [8, 8]);
  const what = `${get("view").selectedOptions[0].text} of ${nameOf(state.head)}`;
  canvas.setAttribute("aria-label", `${what}. Arrow keys read out one patch after the other.`);
  const legend = get("legend").getContext("2d");
  for (let i = 0; i < 128; i++) {
    legend.fillStyle = `rgb(${colour(isSigned() ? i / 63.5 - 1 : i / 127)})`;
    legend.fillRect(i, 0, 1, 1);
  }
  get("legend-low").textContent = isSigned() ? `-${top.toPrecision(2)}` : "0";
  get("legend-high").textContent = top.toPrecision(2) + (get("clip").checked ? " and more" : "");
}

function drawHeads() {
  const all = numbers.map((_, f) => onGrid(current[f]));
  // Two models side by side have one scale.
  const beside = facts.against && state.epoch === null && { raw: "second", second: "raw" }[state.view];
  const others = beside ? numbers.map((_, f) => onGrid(values(f, beside))) : all;
  tops = all.map((shown, f) => Math.max(topOf(shown), topOf(others[f])));
  if (get("shared").checked) {
    // The shared scale is the greatest, or with clipping what nearly all values of all heads stay below.
    const together = [...all, ...others].flatMap((shown) => [...shown]);
    const top = get("clip").checked ? topOf(together) : tops.reduce((a, b) => Math.max(a, b));
    tops = tops.map(() => top);
  }
  for (const button of get("heads").querySelectorAll(".head")) {
    const f = Number(button.dataset.head);
    paint(button.querySelector("canvas"), all[f], tops[f]);
    const whole = sum(current[f].map(Math.abs)) || 1;
    button.querySelector(".prefix i").style.width = `${100 * sum(current[f].slice(0, prefix).map(Math.abs)) / whole}%`;
  }
}

function drawThrough() {
  const picture = facts.pictures[state.picture];
  const words = { rollout: "all layers: rollout", relevance: `all layers: relevance for ${facts.target}` };
  get("through").replaceChildren(...Object.entries(picture.through).map(([name, map]) => {
    const figure = document.createElement("figure"), canvas = document.createElement("canvas");
    const caption = document.createElement("figcaption"), view = state.view;
    state.view = "raw"; // its colours
    paint(canvas, map, Math.max(...map) || 1e-12);
    state.view = view;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", words[name]);
    caption.textContent = words[name];
    figure.append(canvas, caption);
    return figure;
  }));
}

function showReadout() {
  const output = get("readout"), key = state.hover, shown = current[state.head];
  const query = tokenName(state.query);
  if (key !== null) {
    output.dataset.value = shown[key];
    output.textContent = `${query} → ${tokenName(key)}: ${shown[key].toPrecision(4)}`;
  } else {
    const parts = [];
    for (let j = 0; j < prefix; j++) parts.push(`${tokenName(j)} ${shown[j].toPrecision(3)}`);
    const best = shown.reduce((b, value, j) => (value > shown[b] ? j : b), 0);
    output.textContent = `From the ${query}: most to ${tokenName(best)} (${shown[best].toPrecision(3)})` +
      (parts.length ? `; ${parts.join(", ")}.` : ".");
    output.dataset.value = shown[best];
  }
  output.dataset.key = key === null ? "" : key;
}

function readOut(token) {
  if (state.hover === token) return;
  state.hover = token;
  drawLarge();
  showReadout();
}

/** The layer and head of the second model that a head is paired with. */
function partnerOf(f) {
  let head = facts.against.partner[f], layer = 0;
  while (head >= facts.against.heads[layer]) head -= facts.against.heads[layer++];
  return [layer, head];
}

function showHead() {
  const facets = numbers[state.head];
  get("head-title").textContent = `Layer ${facets.layer}, head ${facets.head}`;
  let words = `${facets.role}: ${facets.words}`;
  if (facts.against) {
    const [layer, head] = partnerOf(state.head);
    words += `; in the second model paired with layer ${layer} head ${head}, ` +
      `${facts.against.drift[state.head].toPrecision(3)} nats apart`;
  }
  get("head-words").textContent = words;
  const rows = Object.entries(facets).filter(([, value]) => typeof value === "number" || value === null);
  get("numbers").replaceChildren(...rows.slice(2).map(([name, value]) => {
    const line = document.createElement("tr");
    line.innerHTML = "<th scope=row></th><td class=number></td>";
    line.children[0].textContent = name.replaceAll("_", " ");
    line.children[1].textContent = short(value);
    return line;
  }));
  for (const button of get("heads").querySelectorAll(".head")) {
    const isChosen = Number(button.dataset.head) === state.head;
    button.setAttribute("aria-current", isChosen);
    button.classList.toggle("off", isChosen && state.off !== "on");
    button.tabIndex = isChosen ? 0 : -1;
  }
  showPrediction();
}

function showPrediction() {
  const picture = facts.pictures[state.picture];
  if (!picture.labels) { get("off").hidden = true; return; }
  const change = state.off === "on" ? null : picture.changes[state.off][state.head];
  const rows = picture.labels.map((label, i) => {
    const before = picture.probabilities[i], after = change ? change.p[i] : before;
    const line = document.createElement("tr");
    line.innerHTML = "<th scope=row></th><td class=bar><div><i></i></div></td><td class=number></td><td class=number></td>";
    line.children[0].textContent = label;
    line.querySelector("i").style.width = `${100 * before}%`;
    if (change) {
      const bar = document.createElement("i");
      bar.style.width = `${100 * after}%`;
      line.querySelector("div").append(bar);
      line.children[3].textContent = `${after >= before ? "+" : "−"}${percent(Math.abs(after - before))}`;
    }
    line.children[2].textContent = percent(after);
    line.children[2].dataset.value = after;
    return line;
  });
  const [without, top, share] = change ? [` without ${nameOf(state.head)}`, change.top, change.top_p] :
    ["", picture.labels[0], picture.probabilities[0]];
  const table = get("prediction"), words = `Prediction${without}: ${top} (${percent(share)})`;
  if (table.caption.textContent !== words) table.caption.textContent = words; // what is said aloud
  table.tBodies[0].replaceChildren(...rows);
}

// ---- the grid of heads

function effect(f) {
  const picture = facts.pictures[state.picture];
  return Math.abs(picture.changes.mean[f].p[0] - picture.probabilities[0]);
}

function sortValue(f) {
  const key = get("sort").value;
  if (key === "effect") return effect(f);
  if (key === "drift") return facts.against.drift[f];
  return numbers[f][key];
}

function buildHeads() {
  const box = get("heads"), key = get("sort").value, isByLayer = key === "layer";
  const order = numbers.map((_, f) => f);
  if (!isByLayer) order.sort((a, b) => (sortValue(b) ?? -Infinity) - (sortValue(a) ?? -Infinity));
  const columns = Math.max(...facts.heads);
  const size = gridWidth > gridHeight ? 76 : 58;
  box.style.gridTemplateColumns =
    isByLayer ? `max-content repeat(${columns}, minmax(30px, ${2 * size}px))` : `repeat(auto-fill, ${1.5 * size}px)`;
  const parts = [];
  for (const f of order) {
    const { layer, head, words } = numbers[f];
    if (isByLayer && (f === 0 || numbers[f - 1].layer !== layer)) {
      const label = document.createElement("div");
      label.className = "layer";
      label.textContent = `layer ${layer}`;
      label.style.gridColumn = 1;
      parts.push(label);
    }
    const button = document.createElement("button");
    button.type = "button";
    button.className = "head";
    button.dataset.head = f;
    button.title = `${nameOf(f)}: ${words}`;
    button.setAttribute("aria-label", isByLayer ? button.title : `${button.title}; ${key} ${short(sortValue(f))}`);
    button.innerHTML = "<canvas></canvas><span class=prefix><i></i></span>";
    if (!isByLayer) {
      const small = document.createElement("small");
      small.textContent = `${layer}.${head}  ${short(sortValue(f))}`;
      button.append(small);
    }
    parts.push(button);
  }
  box.replaceChildren(...parts);
}

// ---- what changes what

function refresh() {
  current = numbers.map((_, f) => values(f));
  drawStage();
  drawHeads();
  refreshHead();
  for (const button of get("queries").children) {
    button.setAttribute("aria-pressed", Number(button.dataset.token) === state.query);
  }
}

function refreshHead() {
  showHead();
  drawLarge();
  showReadout();
}

function chooseQuery(token) {
  if (facts.epochs && state.epoch !== null) chooseEpoch(facts.epochs.names.length); // earlier ones keep one query
  state.query = token;
  state.hover = null;
  refresh();
}

function chooseHead(f) {
  state.head = f;
  refreshHead();
}

function choosePicture(place) {
  state.picture = place;
  state.hover = null;
  image.onload = () => {
    if (get("sort").value === "effect") buildHeads();
    refresh();
    drawThrough();
    document.documentElement.dataset.ready = place; // for programs that wait
  };
  image.src = facts.pictures[place].src;
}

function chooseOff(mode) {
  state.off = mode;
  document.querySelector(`[name=off][value=${mode}]`).checked = true;
  showHead();
}

function chooseEpoch(place) {
  const isLast = place === facts.epochs.names.length;
  state.epoch = isLast ? null : place;
  get("epoch").value = place;
  get("epoch-name").textContent = isLast ? "the model itself" : facts.epochs.names[place];
  if (!isLast) {
    state.query = reader;
    state.view = get("view").value = "raw";
  }
  refresh();
}

function patchAt(event) {
  const box = event.currentTarget.getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / box.width * gridWidth);
  const line = Math.floor((event.clientY - box.top) / box.height * gridHeight);
  return prefix + Math.min(gridHeight - 1, Math.max(0, line)) * gridWidth + Math.min(gridWidth - 1, Math.max(0, column));
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

/** The patch that an arrow key leads to from a token, the first patch from any other; null for other keys. */
function stepped(event, token) {
  const step = STEPS[event.key];
  if (!step) return null;
  event.preventDefault();
  if (token === null || token < prefix) return prefix;
  const patch = token - prefix;
  const line = Math.min(gridHeight - 1, Math.max(0, Math.floor(patch / gridWidth) + step[0]));
  return prefix + line * gridWidth + Math.min(gridWidth - 1, Math.max(0, patch % gridWidth + step[1]));
}

function moveHead(event) {
  const step = STEPS[event.key];
  if (!step || !event.target.dataset.head) return;
  event.preventDefault();
  const buttons = [...get("heads").querySelectorAll(".head")], place = buttons.indexOf(event.target);
  let next = buttons[place + step[1]];
  if (step[0]) { // to what stands nearest in the next line, however many stand there
    const lines = [...new Set(buttons.map((button) => button.offsetTop))].sort((a, b) => a - b);
    const line = lines[lines.indexOf(event.target.offsetTop) + step[0]];
    const away = (button) => Math.abs(button.offsetLeft - event.target.offsetLeft);
    [next] = buttons.filter((button) => button.offsetTop === line).sort((a, b) => away(a) - away(b));
  }
  if (next) { next.focus(); chooseHead(Number(next.dataset.head)); }
}

function onKey(event) {
  if (event.target.matches("select, input") || event.ctrlKey || event.metaKey || event.altKey) return;
  const count = numbers.length;
  const actions = {
    c: () => chooseQuery(reader),
    n: () => chooseHead((state.head + 1) % count),
    p: () => chooseHead((state.head + count - 1) % count),
    o: () => facts.pictures[0].labels && chooseOff(state.off === "on" ? "zero" : "on"),
  };
  actions[event.key]?.();
}

function option(value, text) {
  const made = document.createElement("option");
  made.value = value;
  made.textContent = text;
  return made;
}

function setUp() {
  document.title = get("title").textContent = facts.title;
  get("summary").textContent = `${numbers.length} heads in ${facts.heads.length} layers, ` +
    `${gridHeight} × ${gridWidth} patches of ${patchHeight} × ${patchWidth} pixels, ${prefix} other tokens. ` +
    `Numbers over ${facts.counted} picture${facts.counted === 1 ? "" : "s"}; "mean" is a head's own mean over the ` +
    `pictures of this page.` +
    (facts.against ? ` The second model is ${facts.against.name}.` : "");
  get("stage").setAttribute("aria-label",
    `Picture with its patches. Arrow keys move the query, c is the ${tokenName(reader)}.`);
  get("view").querySelector("[value=relevance]").textContent = `relevance for ${facts.target}`;
  get("trust").textContent = facts.trust;
  get("storage").textContent = `Stored compactly: a weight shown here is off by at most ` +
    `${facts.error.probability.toPrecision(2)}, a row by ${percent(facts.error.variation)} of its mass on average, ` +
    `relevance by ${percent(facts.error.relevance)} of its size.`;
  get("picture").append(...facts.pictures.map((picture, i) => option(i, picture.name)));
  get("choose").hidden = facts.pictures.length === 1;
  const keys = Object.keys(numbers[0]).filter((key) =>
    typeof numbers[0][key] === "number" && !["layer", "head", "offset_rows", "offset_columns"].includes(key));
  get("sort").append(option("layer", "layer and head"), ...keys.map((key) => option(key, key.replaceAll("_", " "))));
  if (facts.pictures[0].labels) get("sort").append(option("effect", "effect of switching it off"));
  if (facts.against) {
    get("view").append(option("second", "attention of the second model"));
    get("view").append(option("difference", "difference: the second model minus this"));
    get("sort").append(option("drift", "drift to the paired head"));
    get("partner-box").hidden = facts.against.same_place === null;
  }
  const named = reader === POOLED ? [POOLED] : [];
  for (let token = 0; token < prefix; token++) named.push(token);
  get("queries").append(...named.map((token) => {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.token = token;
    button.textContent = tokenName(token);
    button.onclick = () => chooseQuery(token);
    return button;
  }));
  if (facts.epochs) {
    get("epoch-box").hidden = false;
    get("epoch").max = get("epoch").value = facts.epochs.names.length;
    get("epoch-name").textContent = "the model itself";
    get("epoch").oninput = (event) => chooseEpoch(Number(event.target.value));
  }
  if (matchMedia("(prefers-color-scheme: dark)").matches) document.documentElement.classList.add("dark");
  get("theme").onclick = () => document.documentElement.classList.toggle("dark");
  get("picture").onchange = (event) => choosePicture(Number(event.target.value));
  get("view").onchange = (event) => {
    state.view = event.target.value;
    if (state.epoch !== null) chooseEpoch(facts.epochs.names.length);
    else refresh();
  };
  get("sort").onchange = () => { buildHeads(); drawHeads(); showHead(); };
  for (const id of ["shared", "clip", "partner"]) get(id).onchange = refresh;
  for (const input of document.querySelectorAll("[name=off]")) input.onchange = () => chooseOff(input.value);
  for (const id of ["stage", "large"]) {
    get(id).onclick = (event) => chooseQuery(patchAt(event));
    get(id).onmousemove = (event) => readOut(patchAt(event));
    get(id).onmouseleave = get(id).onblur = () => readOut(null);
  }
  get("stage").onkeydown = (event) => {
    const token = stepped(event, state.query);
    if (token !== null) chooseQuery(token);
  };
  get("large").onkeydown = (event) => {
    const token = stepped(event, state.hover);
    if (token !== null) readOut(token);
  };
  get("heads").onclick = (event) => {
    const button = event.target.closest(".head");
    if (button) chooseHead(Number(button.dataset.head));
  };
  get("heads").onkeydown = moveHead;
  document.onkeydown = onKey;
  buildHeads();
  choosePicture(0);
}

setUp();
