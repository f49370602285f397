"""The looks of heads.html, and the script that inflates its maps, draws them and answers pointer and keys."""

STYLE = """
.runs, .two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 20px 28px }
.runs > *, .two > * { min-width: 0 }
.facts, .small { color: var(--soft); font-size: .875rem; margin: .3em 0 }
.overview { display: grid; grid-template-columns: max-content repeat(var(--heads), minmax(26px, 76px)); gap: 3px;
  overflow-x: auto; padding: 4px; align-items: center; align-content: start; font-size: .75rem; color: var(--soft);
  text-align: center }
.overview button { all: unset; cursor: pointer; border: 1px solid var(--line); border-radius: 3px; line-height: 0;
  box-sizing: border-box; width: 100%; background: var(--box) }
.overview button[aria-pressed=true] { outline: 3px solid var(--accent) }
.overview .edge { margin-left: 8px; width: calc(100% - 8px) }
.overview .kv { border-bottom: 2px solid var(--soft); margin-left: 8px; overflow: hidden; white-space: nowrap }
.overview .of { text-align: right; padding-right: 4px; white-space: nowrap; overflow-wrap: normal }
.overview canvas { width: 100%; aspect-ratio: 1 }
.overview button:focus-visible, .grid:focus-visible, .strip :focus-visible, .w-o:focus-visible
  { outline: 3px solid var(--text); outline-offset: 1px }
.told { min-height: 3.1em; margin: .4em 0; font-variant-numeric: tabular-nums; max-width: none }
.strip { white-space: break-spaces; border: 1px solid var(--line); border-radius: 6px; padding: .5em .7em;
  max-height: 15em; overflow-y: auto; position: relative; line-height: 1.7 }
.strip span { cursor: pointer; border-radius: 2px; padding: 1px 0; unicode-bidi: isolate }
.strip [aria-selected=true] { box-shadow: 0 0 0 2px var(--text) }
.bar { display: inline-block; vertical-align: middle; width: 120px; height: 12px; border: 1px solid var(--line);
  margin: 0 6px }
.bar.weight { background: linear-gradient(to right, transparent, var(--accent)) }
.bar.sign { background: linear-gradient(to right, rgb(213 94 0), transparent, rgb(0 114 178)) }
.controls { display: flex; flex-wrap: wrap; gap: 10px; align-items: center; margin: .8em 0 }
.controls button, .controls select { font: inherit; max-width: 100%; padding: .25em .7em; min-height: 34px }
.controls label { display: flex; gap: 6px; align-items: center; max-width: 100% }
.small i { display: inline-block; width: 12px; height: 12px; margin: 0 4px 0 8px }
.controls [hidden] { display: none }
.w-o { border: 1px solid var(--line); border-radius: 6px; padding: 10px; overflow-x: auto }
canvas { display: block }
.card { background: #fff; border: 1px solid var(--line); border-radius: 6px; overflow-x: auto }
.card svg { display: block; max-width: 100%; height: auto; min-width: 480px; margin: 0 auto }
th, th button { white-space: normal; vertical-align: bottom }
dt { font-weight: 600; margin-top: .7em }
dd { margin: 0; max-width: 80ch }
"""

SCRIPT = r"""
const {runs, matrices} = JSON.parse(document.getElementById("heads").textContent)
const painters = []  // each draws something anew, when width or theme change
const css = name => getComputedStyle(document.body).getPropertyValue(name).trim()
// Control characters and those that turn the direction of writing, as runtime/errors.py has them, by their numbers.
const coded = text => text.replace(/[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g,
  c => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"))
const visible = token => coded(token).replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "␣") || "∅"
const short = name => [...name].length > 9 ? [...name].slice(0, 8).join("") + "…" : name
const signed = value => (value < 0 ? "-" : "+") + Math.abs(value).toFixed(3)
const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0))
const live = {className: "told", "aria-live": "polite"}
const arrows = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]}  // row, column

function el(tag, set = {}, ...inside) {
  const made = document.createElement(tag)
  for (const [key, value] of Object.entries(set)) key in made ? made[key] = value : made.setAttribute(key, value)
  made.append(...inside)
  return made
}

// Calls moved(rows, columns, event) for an arrow key, which then does not scroll.
function onArrow(box, moved) {
  box.addEventListener("keydown", event => {
    if (!arrows[event.key] || event.ctrlKey || event.altKey || event.metaKey) return
    event.preventDefault()
    moved(...arrows[event.key], event)
  })
}

async function inflate(text) {
  const stream = new Blob([bytes(text)]).stream().pipeThrough(new DecompressionStream("deflate"))
  return new Uint8Array(await new Response(stream).arrayBuffer())
}

// The weights that token i gives to tokens 0 .. i; one that was not kept is undefined.
function row({T, kept, maps}, head, i) {
  if (!kept) {
    const at = (head * T * (T + 1) + i * (i + 1)) / 2
    return Array.from(maps.subarray(at, at + i + 1), byte => byte / 255)
  }
  const found = new Array(i + 1), plane = maps.length / 3
  const before = n => n < kept ? n * (n + 1) / 2 : kept * (kept + 1) / 2 + kept * (n - kept)  // kept in n rows
  const start = head * before(T) + before(i)
  for (let at = start, key = i; at < start + Math.min(kept, i + 1); at++) {
    key -= maps[at] + 256 * maps[plane + at]
    found[key] = maps[2 * plane + at] / 255
  }
  return found
}

const largest = weights => weights.reduce((best, w, j) => w > (weights[best] ?? -1) ? j : best, 0)
// The square root lets small weights be seen. In a head's overview it was taken before it was packed.
const block = (run, head, i, j) => run.blocks[head * run.side * (run.side + 1) / 2 + i * (i + 1) / 2 + j] / 255
const thumbnail = (run, head) => !run.kept ? big(run, head)
  : picture(run.side, i => Array.from({length: i + 1}, (_, j) => block(run, head, i, j)))
const big = (run, head) => picture(run.T, i => Array.from(row(run, head, i), (w, j) => w !== undefined ? Math.sqrt(w)
  : block(run, head, Math.floor(i / run.step), Math.floor(j / run.step)) * Math.sqrt(run.peaks[head])))

// A canvas of n x n points: shades(i) gives row i's from 0 to 1.
function picture(n, shades) {
  const canvas = el("canvas", {width: n, height: n}), pen = canvas.getContext("2d"), points = pen.createImageData(n, n)
  const [red, green, blue] = css("--accent").match(/\w\w/g).map(part => parseInt(part, 16))
  for (let i = 0; i < n; i++) shades(i).forEach((shade, j) => {
    const at = 4 * (i * n + j)
    points.data[at] = red; points.data[at + 1] = green; points.data[at + 2] = blue
    points.data[at + 3] = Math.round(255 * Math.min(1, shade ?? 0))
  })
  pen.putImageData(points, 0, 0)
  return canvas
}

// The pen of a canvas made this large, sharp on a dense screen; canvases wider than 16,000 points may stay empty.
function sized(canvas, width, height) {
  const dense = Math.min(devicePixelRatio, 16000 / width), pen = canvas.getContext("2d")
  Object.assign(canvas, {width: Math.round(width * dense), height: Math.round(height * dense)})
  Object.assign(canvas.style, {width: width + "px", height: height + "px"})
  pen.scale(dense, dense)
  pen.font = "12px system-ui, sans-serif"
  pen.textBaseline = "middle"
  return pen
}

// A square map with names on both axes, as many as have room. point(i, j): row i was pointed at, -1 is its name.
function grid(box, names, point) {
  const n = names.length, canvas = el("canvas", {className: "grid", tabIndex: 0, role: "img"})
  const edge = 10 + 7 * names.reduce((most, name) => Math.max(most, [...short(name)].length), 2)
  let size = 1
  canvas.onpointermove = canvas.onpointerdown = event => {
    const {left, top} = canvas.getBoundingClientRect()
    const i = Math.floor((event.clientY - top) / size * n), j = Math.floor((event.clientX - left - edge) / size * n)
    if (i >= 0 && i < n && j < n) point(i, Math.max(j, -1))
  }
  canvas.dataset.edge = edge
  box.append(canvas)
  const draw = (map, row, column) => {
    size = Math.max(120, Math.min(box.clientWidth - edge, 560, 48 * n))
    const pen = sized(canvas, edge + size, size + edge), cell = size / n, every = Math.ceil(14 / cell)
    pen.imageSmoothingEnabled = cell < 1
    pen.drawImage(map, edge, 0, size, size)
    pen.strokeStyle = css("--line")
    pen.strokeRect(edge + .5, .5, size - 1, size - 1)
    pen.textAlign = "right"
    for (const [marked, turned] of [[row, false], [column, true]]) for (let k = 0; k < n; k++) {
      if (k !== marked && (k % every || (marked >= 0 && Math.abs(k - marked) < every))) continue
      pen.save()
      pen.fillStyle = css(k === marked ? "--text" : "--soft")
      if (k === marked) pen.font = "bold " + pen.font
      const along = Math.max(7, Math.min(size - 7, (k + .5) * cell))  // so that no name is cut at an end
      pen.translate(turned ? edge + along : edge - 5, turned ? size + 5 : along)
      if (turned) pen.rotate(-Math.PI / 2)
      pen.fillText(short(names[k]), 0, 0)
      pen.restore()
    }
    pen.strokeStyle = css("--text")
    pen.strokeRect(edge, row * cell, size, cell)
    if (column >= 0) pen.strokeRect(edge + column * cell, row * cell, cell, cell)
  }
  return {canvas, draw}
}

// One run: all heads small, one large, and the text.
function panel(run) {
  const {T, kv, labels, tokens} = run, L = labels.length, H = kv.length
  const spaced = tokens.every(token => token[0] === " ")  // words, whose spaces tell nothing
  const shown = tokens.map(token => visible(spaced ? token.slice(1) : token))
  let head = 0, query = -1, key = -1, map
  const told = el("p", live), title = el("h4"), box = el("div")
  const overview = el("div", {className: "overview", role: "group", "aria-label": `Heads of ${run.name}`})
  const strip = el("div", {className: "strip", role: "listbox", "aria-label": "The text; choose a token"})
  const words = tokens.map((token, i) => el("span", {role: "option", tabIndex: -1, "data-i": i},
    coded(token).replace(/\n/g, "↵\n") || "∅"))
  strip.append(...words)
  const together = runs.filter(other => other.tokens.join("\0") === tokens.join("\0"))
  const choose = (i, j) => together.forEach(other => other.select(i, j))
  const {canvas, draw} = grid(box, shown, choose)

  run.select = (i, j) => {
    if (i === query && j === key) return
    const from = words[query]
    if (from) { from.tabIndex = -1; from.ariaSelected = "false" }
    [query, key] = [i, j]
    words[i].tabIndex = 0
    words[i].ariaSelected = "true"
    if (words[i].offsetTop < strip.scrollTop || words[i].offsetTop > strip.scrollTop + strip.clientHeight - 24)
      strip.scrollTop = words[i].offsetTop - strip.clientHeight / 2
    tell()
  }
  function tell() {
    const weights = row(run, head, query), j = key < 0 ? largest(weights) : key
    const found = j > query ? "none, because it comes later"
      : weights[j] === undefined ? `not among its ${run.kept} largest weights`
      : `weight ${weights[j].toFixed(3)}${key < 0 ? ", its largest" : ""}`
    told.textContent = `from token ${query} '${shown[query]}' to token ${j} '${shown[j]}': ${found}`
    const accent = css("--accent")
    words.forEach((word, i) => {
      const shade = Math.sqrt(weights[i] ?? 0)
      word.style.background = shade ? `color-mix(in srgb, ${accent} ${Math.round(100 * shade)}%, transparent)` : ""
      word.style.color = shade > .65 ? "var(--back)" : ""
    })
    draw(map, query, j)
  }
  function pick(chosen) {
    buttons.forEach((button, i) => {
      button.ariaPressed = String(i === chosen)
      button.tabIndex = i === chosen ? 0 : -1
    })
    const l = Math.floor(chosen / H), h = chosen % H
    head = chosen
    title.textContent = `Layer ${l}, head ${h}${shared ? `, K/V head ${kv[h]}` : ""}: ${labels[l][h]}`
    canvas.setAttribute("aria-label", `Map of layer ${l}, head ${h}. Left and right arrow keys choose the token.`)
    map = big(run, head)
    tell()
  }

  const shared = new Set(kv).size < H, first = h => shared && kv[h] !== kv[h - 1]
  overview.style.setProperty("--heads", H)
  if (shared) {
    overview.append(el("span", {className: "of"}, "K/V head"))
    for (let h = 0, end; h < H; h = end) {
      for (end = h + 1; kv[end] === kv[h];) end++
      overview.append(el("span", {className: "kv", style: `grid-column: span ${end - h}`}, kv[h]))
    }
  }
  overview.append(el("span", {className: "of"}, "head"), ...kv.map((_, h) => el("span", {}, h)))
  const buttons = labels.flatMap((names, l) => names.map((name, h) => el("button", {
    type: "button", title: name, "aria-label": `layer ${l}, head ${h}: ${name}`, className: first(h) ? "edge" : "",
    onclick: () => pick(l * H + h)})))
  buttons.forEach((button, i) => {
    if (i % H === 0) overview.append(el("span", {className: "of"}, `layer ${i / H}`))
    overview.append(button)
    onArrow(button, (down, right) => {
      const l = Math.floor(i / H) + down, h = i % H + right
      if (l < 0 || l >= L || h < 0 || h >= H) return
      pick(l * H + h)
      buttons[l * H + h].focus()
    })
  })
  onArrow(canvas, (down, right) => choose(Math.min(T - 1, Math.max(0, query + down + right)), -1))
  onArrow(strip, (down, right) => words[Math.min(T - 1, Math.max(0, query + down + right))].focus())
  for (const kind of ["pointerover", "focusin"]) strip.addEventListener(kind, event => {
    if (event.target.dataset.i) choose(Number(event.target.dataset.i), -1)
  })
  document.getElementById("runs").append(el("section", {className: "run"}, el("h3", {}, run.name),
    el("p", {className: "facts"}, run.facts), el("div", {className: "two"}, overview, el("div", {}, title, box, told)),
    strip))
  painters.push(() => {
    buttons.forEach((button, i) => button.replaceChildren(thumbnail(run, i)))
    query < 0 ? (map = big(run, 0), run.select(T - 1, -1), pick(0)) : pick(head)
  })
}

// One token through one layer: what the heads hand over, the same side by side, and what W_O makes of it.
function steps(section) {
  const having = runs.filter(run => run.w_o), canvas = el("canvas"), told = el("p", live), text = el("p")
  const legend = el("p", {className: "small"}), box = el("div", {className: "w-o", tabIndex: 0, role: "group",
    "aria-label": "One token through W_O; left and right arrow keys choose the step"}, canvas)
  const [which, layer, place] = ["run", "layer", "token"].map(name => el("select", {"aria-label": name}))
  const fill = (select, names) => select.replaceChildren(...names.map((name, i) => el("option", {value: i}, name)))
  const back = el("button", {onclick: () => go(-1)}, "Back"), next = el("button", {onclick: () => go(1)}, "Next")
  let step = 0, cells = []  // cells: left, top, width, height, what pointing at it says
  section.append(el("div", {className: "controls"}, el("label", {hidden: having.length < 2}, "run", which),
    el("label", {}, "layer", layer), el("label", {}, "token", place), back, next), text, box, legend, told)

  function draw() {
    const {kv: {length: H}, labels: {length: L}, w_o: {width, out, bias, heads, shares}} = having[which.value]
    const at = (place.value * L + Number(layer.value)) * H, room = box.clientWidth - 24
    const hue = h => `hsl(${Math.round(360 * h / H)} 65% ${h % 2 ? 62 : 45}%)`
    const each = Array.from({length: H}, (_, h) => h)
    const given = heads.subarray(at * width, (at + H) * width), most = Math.max(...given.map(Math.abs))
    const fit = (columns, left, least) => Math.max(least, Math.min(20, Math.floor((room - left) / columns)))
    back.disabled = step === 0
    next.disabled = step === 2
    cells = []
    told.textContent = "Point at a cell or a bar to read it."
    text.textContent = [
      `Step 1 of 3. Each head has mixed its values by its weights and hands over a row for this token, ${width} long.`,
      `Step 2 of 3. The rows are laid side by side: ${H} x ${width} = ${H * width} numbers.`,
      `Step 3 of 3. W_O mixes them into ${out} outputs. Each head's exact share of an output is a piece of its bar, ` +
      `above the line if it adds and below if it takes away; the mark is the sum, ` +
      (bias ? "to which W_O's bias is added." : "which the layer hands on.")][step]
    legend.replaceChildren(...step === 2 ? each.flatMap(h => [el("i", {style: `background: ${hue(h)}`}), `head ${h} `])
      : [signed(-most), el("span", {className: "bar sign"}), signed(most)])
    if (step < 2) {
      const w = step ? fit(width * H, 0, 3) : fit(width, 70, 5)
      const pen = sized(canvas, step ? w * width * H : 70 + w * width, step ? 60 : 20 * H)
      for (const h of each) {
        const left = step ? h * width * w : 70, top = step ? 2 : 20 * h + 2
        pen.fillStyle = hue(h)
        pen.fillRect(step ? left : 0, step ? 24 : top, step ? width * w - 1 : 8, step ? 8 : 16)
        pen.fillStyle = css("--text")
        pen.fillText(step && w * width < 50 ? h : `head ${h}`, step ? left : 14, step ? 44 : top + 8)
        given.subarray(h * width, (h + 1) * width).forEach((value, c) => {
          pen.fillStyle = `rgb(${value < 0 ? "213 94 0" : "0 114 178"} / ${Math.abs(value) / most || 0})`
          pen.fillRect(left + c * w, top, w - 1, 16)
          cells.push([left + c * w, top, w, 16, `head ${h}, number ${c}: ${signed(value)}`])
        })
      }
      return
    }
    const columns = Array.from({length: out}, (_, o) => each.map(h => shares[(at + h) * out + o]))
    const total = (values, way) => values.reduce((sum, value) => sum + Math.max(0, way * value), 0)
    const high = Math.max(...columns.map(values => Math.max(total(values, 1), total(values, -1)))) || 1
    const w = fit(out, 56, 4), pen = sized(canvas, 56 + w * out, 240), y = value => 120 - value / high * 110
    pen.fillStyle = css("--text")
    for (const value of [high, 0, -high]) pen.fillText(signed(value), 0, y(value))
    columns.forEach((values, o) => {
      const left = 56 + o * w, ends = {up: 0, down: 0}, sum = values.reduce((a, b) => a + b, 0)
      values.forEach((value, h) => {
        const way = value > 0 ? "up" : "down", from = ends[way]
        ends[way] += value
        pen.fillStyle = hue(h)
        pen.fillRect(left, y(Math.max(from, ends[way])), w - 1, Math.abs(value) / high * 110)
      })
      pen.fillStyle = css("--text")
      pen.fillRect(left, y(sum) - 1, w - 1, 3)
      const parts = values.map((value, h) => `head ${h} ${signed(value)}`).join(", ")
      cells.push([left, 0, w, 240, `output ${o}: ${parts}, sum ${signed(sum)}`])
    })
    pen.fillRect(56, 120, w * out, 1)
  }
  function enter() {  // another run: its own layers and tokens
    const {labels, w_o: {places}} = having[which.value]
    fill(layer, labels.map((_, l) => l))
    fill(place, places.map(([i, token]) => `${i} '${visible(token)}'`))
    place.value = places.length - 1
  }
  const go = by => { step = Math.max(0, Math.min(2, step + by)); draw() }
  onArrow(box, (down, right) => go(down + right))
  canvas.onpointermove = canvas.onpointerdown = ({offsetX: x, offsetY: y}) => {
    const cell = cells.find(([left, top, w, high]) => x >= left && x < left + w && y >= top && y < top + high)
    if (cell) told.textContent = cell[4]
  }
  fill(which, having.map(run => run.name))
  enter()
  which.onchange = () => { enter(); draw() }
  layer.onchange = place.onchange = draw
  painters.push(draw)
}

function matrix({names, values, max}, box) {
  const told = el("p", live)
  let at = [0, 0], map
  const {canvas, draw} = grid(box, names, (i, j) => show(i, j))
  const show = (i, j) => {
    at = [i, j]
    told.textContent = j < 0 ? names[i] : `${names[i]} and ${names[j]}: ${values[i][j]?.toFixed(3) ?? "no value"}`
    draw(map, i, j)
  }
  const kept = k => Math.max(0, Math.min(names.length - 1, k))
  canvas.setAttribute("aria-label", "A map of pairs; the arrow keys choose one")
  onArrow(canvas, (down, right) => show(kept(at[0] + down), kept(at[1] + right)))
  box.append(told)
  painters.push(() => {
    map = picture(names.length, i => values[i].map(value => value / max))
    show(...at)
  })
}

async function start() {
  for (const run of runs) {
    const floats = text => new Float32Array(bytes(text).buffer)
    run.maps = await inflate(run.maps)
    if (run.kept) run.blocks = await inflate(run.blocks)
    if (run.w_o) Object.assign(run.w_o, {heads: floats(run.w_o.heads), shares: floats(run.w_o.shares)})
    panel(run)
  }
  if (runs.some(run => run.w_o)) steps(document.getElementById("w_o"))
  matrices.forEach((one, i) => matrix(one, document.getElementById(`matrix-${i}`)))
  const paint = () => painters.forEach(painter => painter())
  let wait, wide = innerWidth
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint)
  addEventListener("resize", () => {
    if (wide !== innerWidth) { wide = innerWidth; clearTimeout(wait); wait = setTimeout(paint, 150) }
  })
  paint()
  document.body.dataset.drawn = "yes"
}
start().catch(error => document.getElementById("runs").append(`The maps could not be drawn: ${error}.`))
"""
