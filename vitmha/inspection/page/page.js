// The interactive part of the page that page.py renders. f indexes the heads of all layers; decode.js decodes the arrays.

const facts = JSON.parse(document.getElementById("facts").textContent);
const { layout, metrics } = facts;
const [gridHeight, gridWidth] = layout.grid_size;
const [patchHeight, patchWidth] = layout.patch_size;
const tokens = layout.num_tokens, prefix = layout.num_prefix_tokens, patches = tokens - prefix;
const readoutQuery = facts.readout === "class" ? 0 : POOLED;
const state = { image: 0, query: readoutQuery, head: 0, ablation: "none", view: "raw", epoch: null, hover: null };
const get = (id) => document.getElementById(id);

// ---- the stored attention

const decoded = new Map();

/** The arrays of a blob by name, decoded on first use. */
function arraysOf(blob) {
  if (!decoded.has(blob.index)) decoded.set(blob.index, decodeBlob(get(`blob-${blob.index}`).textContent, blob.sections));
  return decoded.get(blob.index);
}

/** The values of a head in a view, one per token. */
function values(head, view = state.view) {
  const image = facts.images[state.image], query = state.query;
  if (state.epoch !== null) {
    const row = (state.epoch * facts.images.length + state.image) * metrics.length + head;
    return dequantizedRow(arraysOf(facts.epochs.blob), row, tokens);
  }
  const data = arraysOf(image.blob);
  if (view === "relevance") return relevanceRow(data, head, query, tokens);
  const weights = attentionRow(data, head, query, tokens);
  if (view === "value") return weights.map((weight, j) => weight * data.norms[head * tokens + j]);
  if (view === "raw") return weights;
  const partner = get("partner").checked ? facts.comparison.partner[head] : head;
  const second = attentionRow(arraysOf(image.other), partner, query, tokens);
  return view === "second" ? second : second.map((weight, j) => weight - weights[j]);
}

// ---- colors

const DARK_TO_LIGHT = [[0, 0, 4], [40, 17, 89], [114, 31, 129], [182, 54, 122], [241, 96, 93], [254, 175, 119], [252, 253, 191]];
const BLUE_TO_RED = [[33, 102, 172], [146, 197, 222], [247, 247, 247], [244, 165, 130], [178, 24, 43]];
const isDiverging = () => state.view === "difference" && state.epoch === null;

/** The color of a fraction of the scale, in [0, 1], or in [-1, 1] for differences. */
function color(fraction, diverging = isDiverging()) {
  const stops = diverging ? BLUE_TO_RED : DARK_TO_LIGHT;
  const position = Math.min(1, Math.max(0, diverging ? (fraction + 1) / 2 : fraction)) * (stops.length - 1);
  const low = Math.min(Math.floor(position), stops.length - 2);
  return stops[low].map((from, i) => Math.round(from + (stops[low + 1][i] - from) * (position - low)));
}

const isZero = (map) => map.every((value) => value === 0);

/** The upper end of the color scale: the maximum, or with clipping the 98th percentile if that is above 0. */
function scaleOf(map) {
  const sizes = Float64Array.from(map, Math.abs).sort();
  const last = get("clip").checked ? Math.floor(0.98 * (sizes.length - 1)) : sizes.length - 1;
  return sizes[last] || sizes[sizes.length - 1] || 1e-12;
}

const onGrid = (row) => row.slice(prefix);

function paint(canvas, map, scale, diverging = isDiverging()) {
  canvas.width = gridWidth;
  canvas.height = gridHeight;
  const context = canvas.getContext("2d"), pixels = context.createImageData(gridWidth, gridHeight);
  for (let i = 0; i < patches; i++) pixels.data.set([...color(map[i] / scale, diverging), 255], 4 * i);
  context.putImageData(pixels, 0, 0);
}

// ---- text

const percent = (fraction) => `${100 * fraction < 0.1 ? (100 * fraction).toFixed(3) : (100 * fraction).toPrecision(3)} %`;
const short = (value) => (value === null ? "-" : Number(value.toPrecision(3)).toString());
const nameOf = (f) => `layer ${metrics[f].layer} head ${metrics[f].head}`;

function tokenName(token) {
  if (token === POOLED) return "mean over all patches";
  if (token < layout.num_class_tokens) return "class token";
  if (token < layout.num_class_tokens + layout.num_distillation_tokens) return "distillation token";
  if (token < prefix) return `register ${token - layout.num_class_tokens - layout.num_distillation_tokens}`;
  const patch = token - prefix;
  return `patch at row ${Math.floor(patch / gridWidth)}, column ${patch % gridWidth}`;
}

const sum = (row) => row.reduce((a, b) => a + b, 0);

// ---- drawing

let current = []; // the displayed values of every head
let scales = []; // the upper end of every head's color scale

const photo = new Image();

function drawStage() {
  const canvas = get("stage"), zoom = Math.max(1, Math.round(560 / (gridWidth * patchWidth)));
  canvas.width = gridWidth * patchWidth * zoom;
  canvas.height = gridHeight * patchHeight * zoom;
  const context = canvas.getContext("2d");
  const [height, width] = [patchHeight * zoom, patchWidth * zoom];
  context.imageSmoothingEnabled = false;
  context.drawImage(photo, 0, 0, canvas.width, canvas.height);
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
  const map = onGrid(current[state.head]), scale = scales[state.head];
  context.imageSmoothingEnabled = false;
  context.filter = "grayscale(1)";
  context.drawImage(photo, 0, 0, canvas.width, canvas.height);
  context.filter = "none";
  for (let i = 0; i < patches; i++) {
    const fraction = map[i] / scale;
    context.globalAlpha = 0.62 + 0.3 * Math.min(1, Math.abs(fraction));
    context.fillStyle = `rgb(${color(fraction)})`;
    context.fillRect((i % gridWidth) * width, Math.floor(i / gridWidth) * height, width, height);
  }
  context.globalAlpha = 1;
  if (state.query >= prefix) frame(context, state.query, width, height);
  if (state.hover !== null) frame(context, state.hover, width, height, [8, 8]);
  const name = `${get("view").selectedOptions[0].text} of ${nameOf(state.head)}`;
  canvas.setAttribute("aria-label", `${name}. Arrow keys read out single patches.`);
  const legend = get("legend").getContext("2d");
  for (let i = 0; i < 128; i++) {
    legend.fillStyle = `rgb(${color(isDiverging() ? i / 63.5 - 1 : i / 127)})`;
    legend.fillRect(i, 0, 1, 1);
  }
  get("legend-low").textContent = isDiverging() && !isZero(map) ? `-${scale.toPrecision(2)}` : "0";
  get("legend-high").textContent = isZero(map) ? "zero everywhere" : (get("clip").checked ? "≥ " : "") + scale.toPrecision(2);
}

function drawHeads() {
  const maps = metrics.map((_, f) => onGrid(current[f]));
  // The attention of two models has one scale, so that switching between them compares them.
  const otherView = facts.comparison && state.epoch === null && { raw: "second", second: "raw" }[state.view];
  const others = otherView ? metrics.map((_, f) => onGrid(values(f, otherView))) : maps;
  scales = maps.map((map, f) => Math.max(scaleOf(map), scaleOf(others[f])));
  if (get("shared").checked) {
    const all = [...maps, ...others].flatMap((map) => [...map]);
    const scale = get("clip").checked ? scaleOf(all) : scales.reduce((a, b) => Math.max(a, b));
    scales = scales.map(() => scale);
  }
  for (const button of get("heads").querySelectorAll(".head")) {
    const f = Number(button.dataset.head);
    paint(button.querySelector("canvas"), maps[f], scales[f]);
    const mass = sum(current[f].map(Math.abs)) || 1;
    button.querySelector(".prefix i").style.width = `${100 * sum(current[f].slice(0, prefix).map(Math.abs)) / mass}%`;
  }
}

function drawAllLayers() {
  const captions = { rollout: "all layers: rollout", relevance: `all layers: relevance for ${facts.target}` };
  get("all-layers").replaceChildren(...Object.entries(facts.images[state.image].all_layers).map(([name, map]) => {
    const figure = document.createElement("figure"), canvas = document.createElement("canvas");
    const caption = document.createElement("figcaption");
    paint(canvas, map, Math.max(...map) || 1e-12, false);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", captions[name]);
    caption.textContent = captions[name] + (isZero(map) ? " (zero everywhere)" : "");
    figure.append(canvas, caption);
    return figure;
  }));
}

function showReadout() {
  const output = get("readout"), key = state.hover, row = current[state.head];
  const query = tokenName(state.query);
  if (key !== null) {
    output.dataset.value = row[key];
    output.textContent = `${query} → ${tokenName(key)}: ${row[key].toPrecision(4)}`;
  } else if (isZero(row)) {
    output.dataset.value = 0;
    output.textContent = `From the ${query}: zero everywhere.`;
  } else {
    const parts = [];
    for (let j = 0; j < prefix; j++) parts.push(`${tokenName(j)} ${row[j].toPrecision(3)}`);
    const best = row.reduce((b, value, j) => (value > row[b] ? j : b), 0);
    output.textContent = `From the ${query}: most to ${tokenName(best)} (${row[best].toPrecision(3)})` +
      (parts.length ? `; ${parts.join(", ")}.` : ".");
    output.dataset.value = row[best];
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
  const { partner, heads } = facts.comparison;
  let head = partner[f], layer = 0;
  while (head >= heads[layer]) head -= heads[layer++];
  return [layer, head];
}

function showHead() {
  const record = metrics[state.head];
  get("head-title").textContent = `Layer ${record.layer}, head ${record.head}`;
  let text = `${record.role}: ${record.description}`;
  if (facts.comparison) {
    const [layer, head] = partnerOf(state.head);
    text += `; paired with layer ${layer} head ${head} of the second model, ` +
      `divergence ${facts.comparison.drift[state.head].toPrecision(3)} nats`;
  }
  get("head-description").textContent = text;
  const numbers = Object.entries(record).filter(([, value]) => typeof value === "number" || value === null);
  get("metrics").replaceChildren(...numbers.slice(2).map(([name, value]) => {
    const row = document.createElement("tr");
    row.innerHTML = "<th scope=row></th><td class=number></td>";
    row.children[0].textContent = name.replaceAll("_", " ");
    row.children[1].textContent = short(value);
    return row;
  }));
  for (const button of get("heads").querySelectorAll(".head")) {
    const isChosen = Number(button.dataset.head) === state.head;
    button.setAttribute("aria-current", isChosen);
    button.classList.toggle("ablated", isChosen && state.ablation !== "none");
    button.tabIndex = isChosen ? 0 : -1;
  }
  showPrediction();
}

function showPrediction() {
  const image = facts.images[state.image];
  if (!image.labels) { get("ablation").hidden = true; return; }
  const ablated = state.ablation === "none" ? null : image.ablations[state.ablation][state.head];
  const rows = image.labels.map((label, i) => {
    const before = image.probabilities[i], after = ablated ? ablated.p[i] : before;
    const row = document.createElement("tr");
    row.innerHTML = "<th scope=row></th><td class=bar><div><i></i></div></td><td class=number></td><td class=number></td>";
    row.children[0].textContent = label;
    row.querySelector("i").style.width = `${100 * before}%`;
    if (ablated) {
      const bar = document.createElement("i");
      bar.style.width = `${100 * after}%`;
      row.querySelector("div").append(bar);
      row.children[3].textContent = `${after >= before ? "+" : "−"}${percent(Math.abs(after - before))}`;
    }
    row.children[2].textContent = percent(after);
    row.children[2].dataset.value = after;
    return row;
  });
  const [condition, top, probability] = ablated ?
    [` with ${nameOf(state.head)} ${state.ablation}-ablated`, ablated.top, ablated.top_p] :
    ["", image.labels[0], image.probabilities[0]];
  const table = get("prediction"), text = `Prediction${condition}: ${top} (${percent(probability)})`;
  if (table.caption.textContent !== text) table.caption.textContent = text; // a live region: read aloud when it changes
  table.tBodies[0].replaceChildren(...rows);
}

// ---- the grid of heads

function sortValue(f) {
  const key = get("sort").value, image = facts.images[state.image];
  if (key === "effect") return Math.abs(image.ablations.mean[f].p[0] - image.probabilities[0]);
  if (key === "drift") return facts.comparison.drift[f];
  return metrics[f][key];
}

function buildHeads() {
  const box = get("heads"), key = get("sort").value, isByLayer = key === "layer";
  const order = metrics.map((_, f) => f);
  if (!isByLayer) order.sort((a, b) => (sortValue(b) ?? -Infinity) - (sortValue(a) ?? -Infinity));
  const columns = Math.max(...facts.heads);
  const size = gridWidth > gridHeight ? 76 : 58;
  box.style.gridTemplateColumns =
    isByLayer ? `max-content repeat(${columns}, minmax(30px, ${2 * size}px))` : `repeat(auto-fill, ${1.5 * size}px)`;
  const parts = [];
  for (const f of order) {
    const { layer, head, description } = metrics[f];
    if (isByLayer && (f === 0 || metrics[f - 1].layer !== layer)) {
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
    button.title = `${nameOf(f)}: ${description}`;
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

// ---- actions

function refresh() {
  current = metrics.map((_, f) => values(f));
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
  if (facts.epochs && state.epoch !== null) chooseEpoch(facts.epochs.names.length); // earlier epochs are stored for one query only
  state.query = token;
  state.hover = null;
  refresh();
}

function chooseHead(f) {
  state.head = f;
  refreshHead();
}

function chooseImage(index) {
  state.image = index;
  state.hover = null;
  photo.onload = () => {
    if (get("sort").value === "effect") buildHeads();
    refresh();
    drawAllLayers();
    document.documentElement.dataset.ready = index; // for tests and other programs that wait for the page
  };
  photo.src = facts.images[index].src;
}

function chooseAblation(kind) {
  state.ablation = kind;
  document.querySelector(`[name=ablation][value=${kind}]`).checked = true;
  showHead();
}

function chooseEpoch(index) {
  const isFinal = index === facts.epochs.names.length;
  state.epoch = isFinal ? null : index;
  get("epoch").value = index;
  get("epoch-name").textContent = isFinal ? "final model" : facts.epochs.names[index];
  if (!isFinal) {
    state.query = readoutQuery;
    state.view = get("view").value = "raw";
  }
  refresh();
}

function patchAt(event) {
  const box = event.currentTarget.getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / box.width * gridWidth);
  const row = Math.floor((event.clientY - box.top) / box.height * gridHeight);
  return prefix + Math.min(gridHeight - 1, Math.max(0, row)) * gridWidth + Math.min(gridWidth - 1, Math.max(0, column));
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

/** The patch that an arrow key moves to; from a prefix token the first patch. Null for other keys. */
function stepped(event, token) {
  const step = STEPS[event.key];
  if (!step) return null;
  event.preventDefault();
  if (token === null || token < prefix) return prefix;
  const patch = token - prefix;
  const row = Math.min(gridHeight - 1, Math.max(0, Math.floor(patch / gridWidth) + step[0]));
  return prefix + row * gridWidth + Math.min(gridWidth - 1, Math.max(0, patch % gridWidth + step[1]));
}

function moveHead(event) {
  const step = STEPS[event.key];
  if (!step || !event.target.dataset.head) return;
  event.preventDefault();
  const buttons = [...get("heads").querySelectorAll(".head")];
  let next = buttons[buttons.indexOf(event.target) + step[1]];
  if (step[0]) { // to the nearest head of the next row, which may have another number of heads
    const rows = [...new Set(buttons.map((button) => button.offsetTop))].sort((a, b) => a - b);
    const row = rows[rows.indexOf(event.target.offsetTop) + step[0]];
    const distance = (button) => Math.abs(button.offsetLeft - event.target.offsetLeft);
    [next] = buttons.filter((button) => button.offsetTop === row).sort((a, b) => distance(a) - distance(b));
  }
  if (next) { next.focus(); chooseHead(Number(next.dataset.head)); }
}

function onKey(event) {
  if (event.target.matches("select, input") || event.ctrlKey || event.metaKey || event.altKey) return;
  const count = metrics.length;
  const actions = {
    c: () => chooseQuery(readoutQuery),
    n: () => chooseHead((state.head + 1) % count),
    p: () => chooseHead((state.head + count - 1) % count),
    a: () => facts.images[0].labels && chooseAblation(state.ablation === "none" ? "zero" : "none"),
  };
  actions[event.key]?.();
}

function option(value, text) {
  const element = document.createElement("option");
  element.value = value;
  element.textContent = text;
  return element;
}

function setUp() {
  document.title = get("title").textContent = facts.title;
  get("summary").textContent = `${metrics.length} heads in ${facts.heads.length} layers, ` +
    `${gridHeight} × ${gridWidth} patches of ${patchHeight} × ${patchWidth} pixels, ${prefix} prefix token${prefix === 1 ? "" : "s"}. ` +
    `Metrics over ${facts.num_images} image${facts.num_images === 1 ? "" : "s"}; mean ablation replaces the output of ` +
    `a head by its mean over the images of this page.` +
    (facts.comparison ? ` The second model is ${facts.comparison.name}.` : "");
  get("stage").setAttribute("aria-label",
    `Image with its patches. Arrow keys move the query, c selects the ${tokenName(readoutQuery)}.`);
  get("view").querySelector("[value=relevance]").textContent = `relevance for ${facts.target}`;
  get("trust").textContent = facts.trust;
  get("storage").textContent = `Compact storage: the error of a displayed weight is at most ` +
    `${facts.error.probability.toPrecision(2)}, a row is off by ${percent(facts.error.variation)} of its mass on ` +
    `average, relevance by ${percent(facts.error.relevance)} of its norm.`;
  get("image").append(...facts.images.map((image, i) => option(i, image.name)));
  get("choose").hidden = facts.images.length === 1;
  const keys = Object.keys(metrics[0]).filter((key) =>
    typeof metrics[0][key] === "number" && !["layer", "head", "offset_rows", "offset_columns"].includes(key));
  get("sort").append(option("layer", "layer and head"), ...keys.map((key) => option(key, key.replaceAll("_", " "))));
  if (facts.images[0].labels) get("sort").append(option("effect", "effect of mean ablation"));
  if (facts.comparison) {
    get("view").append(option("second", "attention of the second model"));
    get("view").append(option("difference", "difference: second model minus this model"));
    get("sort").append(option("drift", "divergence from the paired head"));
    get("partner-box").hidden = facts.comparison.same_index === null;
  }
  const special = readoutQuery === POOLED ? [POOLED] : [];
  for (let token = 0; token < prefix; token++) special.push(token);
  get("queries").append(...special.map((token) => {
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
    get("epoch-name").textContent = "final model";
    get("epoch").oninput = (event) => chooseEpoch(Number(event.target.value));
  }
  if (matchMedia("(prefers-color-scheme: dark)").matches) document.documentElement.classList.add("dark");
  get("theme").onclick = () => document.documentElement.classList.toggle("dark");
  get("image").onchange = (event) => chooseImage(Number(event.target.value));
  get("view").onchange = (event) => {
    state.view = event.target.value;
    if (state.epoch !== null) chooseEpoch(facts.epochs.names.length);
    else refresh();
  };
  get("sort").onchange = () => { buildHeads(); drawHeads(); showHead(); };
  for (const id of ["shared", "clip", "partner"]) get(id).onchange = refresh;
  for (const input of document.querySelectorAll("[name=ablation]")) input.onchange = () => chooseAblation(input.value);
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
  chooseImage(0);
}

setUp();
