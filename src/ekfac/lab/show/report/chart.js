"use strict";
// Draws curves and planes as SVG: axes, bands, markers, hovering, zooming. What it is given is data; text stays text.
const charts = (function () {
  const NS = "http://www.w3.org/2000/svg";
  const DASHES = ["", "8 4", "2 3", "10 3 2 3", "14 4", "5 2 2 2 2 2"];
  const MARKERS = {
    o: "M4.2,0A4.2,4.2 0 1 1 -4.2,0A4.2,4.2 0 1 1 4.2,0Z", s: "M-4,-4H4V4H-4Z", D: "M0,-5L5,0L0,5L-5,0Z", d: "M0,-5.5L3.5,0L0,5.5L-3.5,0Z",
    "^": "M0,-5L5,4H-5Z", v: "M0,5L5,-4H-5Z", "<": "M-5,0L4,-5V5Z", ">": "M5,0L-4,-5V5Z",
    P: "M-1.7,-5H1.7V-1.7H5V1.7H1.7V5H-1.7V1.7H-5V-1.7H-1.7Z", X: "M-5,-3L-3,-5L0,-2L3,-5L5,-3L2,0L5,3L3,5L0,2L-3,5L-5,3L-2,0Z",
    "*": "M0,-6L1.5,-2L5.7,-2L2.4,0.8L3.5,5L0,2.5L-3.5,5L-2.4,0.8L-5.7,-2L-1.5,-2Z",
    h: "M0,-5L4.4,-2.5V2.5L0,5L-4.4,2.5V-2.5Z", H: "M-5,0L-2.5,-4.4H2.5L5,0L2.5,4.4H-2.5Z", p: "M0,-5L4.8,-1.5L3,4.2H-3L-4.8,-1.5Z",
    8: "M-2,-5H2L5,-2V2L2,5H-2L-5,2V-2Z", x: "M-5,-3L-3,-5L0,-2L3,-5L5,-3L2,0L5,3L3,5L0,2L-3,5L-5,3L-2,0Z",
  };

  function svg(tag, attributes, parent) {
    const found = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes || {})) found.setAttribute(name, value);
    if (parent) parent.append(found);
    return found;
  }

  function text(parent, content, attributes) {
    const found = svg("text", attributes, parent);
    found.textContent = content;
    return found;
  }

  // Dark colours are lightened on a dark ground, so that black stays to be seen.
  function ink(color) {
    if (getComputedStyle(document.documentElement).getPropertyValue("--dark").trim() !== "1") return color;
    const parts = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
    const light = (0.3 * parts[0] + 0.59 * parts[1] + 0.11 * parts[2]) / 255;
    const mix = light < 0.12 ? 0.85 : light < 0.45 ? 0.4 : 0;
    return "rgb(" + parts.map((v) => Math.round(v + mix * (255 - v))).join(",") + ")";
  }

  function short(value) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e5 || size < 1e-3) return value.toExponential(1).replace(".0e", "e").replace("e+", "e");
    return String(Number(value.toPrecision(4)));
  }

  function linearTicks(low, high, count, smallest) {
    const raw = Math.max((high - low) / Math.max(1, count), smallest || 0), power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw) || 10 * power;
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9 * step; n++) found.push(n * step);
    return found;
  }

  function logTicks(low, high, count) {
    const decades = Math.log10(high / low);
    const heads = decades > count ? [1] : decades > count / 3 ? [1] : decades > 0.7 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9];
    const every = Math.max(1, Math.ceil(decades / count)), found = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
      if (e % every === 0) for (const head of heads) if (head * 10 ** e >= low * 0.9999 && head * 10 ** e <= high * 1.0001) found.push(head * 10 ** e);
    }
    return found.length > 1 ? found : linearTicks(low, high, count);
  }

  function scale(values, log, from, to, zoom) {
    const usable = values.filter((v) => v !== null && Number.isFinite(v) && (!log || v > 0));
    let low = Math.min(...usable), high = Math.max(...usable);
    if (!usable.length) [low, high] = [log ? 0.1 : 0, 1];
    if (zoom) [low, high] = zoom;
    else if (log) [low, high] = [low / 1.08, high * 1.08];
    else if (low === high) [low, high] = [low - 0.5, high + 0.5];
    const f = log ? Math.log10 : (v) => v, back = log ? (v) => 10 ** v : (v) => v;
    const a = f(low), b = f(high) === a ? a + 1 : f(high);
    const at = (v) => (v === null || (log && v <= 0) ? NaN : from + ((f(v) - a) / (b - a)) * (to - from));
    return { low, high, log, at, back: (p) => back(a + ((p - from) / (to - from)) * (b - a)) };
  }

  function axes(host, frame, x, y, options) {
    const { left, right, top, bottom, width } = frame;
    const across = Math.max(2, Math.floor((right - left) / 75)), up = Math.max(3, Math.floor((bottom - top) / 45));
    const grid = svg("g", { class: "axes" }, host);
    for (const [s, count, isX] of [[x, across, true], [y, up, false]]) {
      const format = isX ? options.xFormat || short : options.yFormat || short;
      let before = -Infinity;
      for (const tick of s.log ? logTicks(s.low, s.high, count) : linearTicks(s.low, s.high, count, isX && options.xWhole ? 1 : 0)) {
        const p = s.at(tick);
        svg("line", isX ? { x1: p, x2: p, y1: top, y2: bottom } : { x1: left, x2: right, y1: p, y2: p }, grid);
        if (isX && p - before < 34) continue;
        before = isX ? p : before;
        text(grid, format(tick), isX ? { x: p, y: bottom + 16, "text-anchor": "middle" } : { x: left - 7, y: p + 4, "text-anchor": "end" });
      }
    }
    svg("path", { d: `M${left},${top}V${bottom}H${right}`, class: "frame" }, grid);
    text(grid, options.xLabel, { x: (left + right) / 2, y: bottom + 36, "text-anchor": "middle", class: "label xlabel" });
    text(grid, options.yLabel, { x: 4, y: 13, class: "label ylabel" });
    return width;
  }

  function path(points) {
    let found = "", pen = "M";
    for (const [x, y] of points) {
      if (Number.isFinite(x) && Number.isFinite(y)) { found += pen + x.toFixed(1) + "," + y.toFixed(1); pen = "L"; } else pen = "M";
    }
    return found;
  }

  function stairs(points) {
    return points.flatMap((p, i) => (i && Number.isFinite(points[i - 1][1]) ? [[p[0], points[i - 1][1]], p] : [p]));
  }

  const corner = (host, left, right) => ({ left, right, top: 26, bottom: host.clientHeight - 44, width: host.clientWidth });

  // Draws the series and returns what is drawn; `zoom` holds the part that is looked at, and is changed by dragging.
  function curves(host, series, options) {
    if (!host.clientWidth) return null; // not laid out yet; it is drawn when it is
    const frame = corner(host, 54, host.clientWidth - 12);
    const all = (name) => series.flatMap((s) => s[name]);
    const x = scale(all("x"), options.logX, frame.left, frame.right, options.zoom.x);
    const y = scale(all("y"), options.logY, frame.bottom, frame.top, options.zoom.y);
    const root = svg("svg", { width: frame.width, height: host.clientHeight, role: "img", "aria-label": `${options.yLabel} by ${options.xLabel}` });
    axes(root, frame, x, y, options);
    const clip = `clip${(curves.count = (curves.count || 0) + 1)}`;
    svg("rect", { x: frame.left, y: frame.top - 6, width: frame.right - frame.left + 6, height: frame.bottom - frame.top + 6 }, svg("clipPath", { id: clip }, root));
    const body = svg("g", { "clip-path": `url(#${clip})` }, root);
    const spots = [];
    for (const s of series) {
      const color = ink(s.color), group = svg("g", { class: "curve" }, body);
      group.dataset.name = s.name;
      const points = s.x.map((v, i) => [x.at(v), y.at(s.y[i])]);
      if (s.low) {
        const bound = (values) => s.x.map((v, i) => [x.at(v), y.at(values[i])]).filter((p) => Number.isFinite(p[1]));
        const around = bound(s.high).concat(bound(s.low).reverse());
        if (around.length) svg("path", { d: path(around) + "Z", fill: color, class: "band" }, group);
      }
      svg("path", { d: path(s.stairs ? stairs(points) : points), stroke: color, "stroke-dasharray": DASHES[s.variant % DASHES.length], class: "line" }, group);
      const every = Math.max(1, Math.ceil(points.length / 24));
      points.forEach((p, i) => {
        if (!Number.isFinite(p[0]) || !Number.isFinite(p[1])) return;
        spots.push({ s, i, p });
        if (i % every === 0) svg("path", { d: MARKERS[s.marker] || MARKERS.o, transform: `translate(${p[0].toFixed(1)},${p[1].toFixed(1)})`, stroke: color, class: "marker" }, group);
      });
    }
    host.replaceChildren(root);
    hover(host, root, frame, spots, options.describe);
    zooming(host, root, frame, x, y, options);
    return { x, y, series };
  }

  function hover(host, root, frame, spots, describe) {
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    host.append(tip);
    const ring = svg("circle", { r: 7, class: "ring", visibility: "hidden" }, root);
    root.addEventListener("pointermove", (event) => {
      const box = root.getBoundingClientRect(), at = [event.clientX - box.left, event.clientY - box.top];
      let best = null, least = 40 ** 2;
      for (const spot of spots) {
        if (spot.p[0] < frame.left - 1 || spot.p[0] > frame.right + 1 || spot.p[1] < frame.top - 6 || spot.p[1] > frame.bottom + 1) continue;
        const d = (spot.p[0] - at[0]) ** 2 + (spot.p[1] - at[1]) ** 2;
        if (d < least) [best, least] = [spot, d];
      }
      tip.hidden = best === null;
      ring.setAttribute("visibility", best ? "visible" : "hidden");
      if (!best) return;
      ring.setAttribute("cx", best.p[0]);
      ring.setAttribute("cy", best.p[1]);
      tip.replaceChildren(...describe(best.s, best.i).map((line, n) => Object.assign(document.createElement(n ? "div" : "b"), { textContent: line })));
      tip.style.left = Math.max(0, Math.min(best.p[0] + 12, frame.width - tip.offsetWidth - 4)) + "px";
      tip.style.top = Math.max(0, best.p[1] - tip.offsetHeight - 12) + "px";
    });
    root.addEventListener("pointerleave", () => { tip.hidden = true; ring.setAttribute("visibility", "hidden"); });
  }

  function zooming(host, root, frame, x, y, options) {
    let from = null, box = null;
    const place = (event) => {
      const edge = root.getBoundingClientRect(), inside = (v, a, b) => Math.min(Math.max(v, a), b);
      return [inside(event.clientX - edge.left, frame.left, frame.right), inside(event.clientY - edge.top, frame.top, frame.bottom)];
    };
    root.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch") return; // a finger scrolls the page
      from = place(event);
      box = svg("rect", { class: "zoom" }, root);
      root.setPointerCapture(event.pointerId);
    });
    root.addEventListener("pointermove", (event) => {
      if (!from) return;
      const to = place(event);
      box.setAttribute("x", Math.min(from[0], to[0]));
      box.setAttribute("y", Math.min(from[1], to[1]));
      box.setAttribute("width", Math.abs(from[0] - to[0]));
      box.setAttribute("height", Math.abs(from[1] - to[1]));
    });
    root.addEventListener("pointerup", (event) => {
      if (!from) return;
      const to = place(event), start = from;
      from = null;
      box.remove();
      if (Math.abs(start[0] - to[0]) < 8 || Math.abs(start[1] - to[1]) < 8) return;
      options.onZoom({ x: [x.back(Math.min(start[0], to[0])), x.back(Math.max(start[0], to[0]))], y: [y.back(Math.max(start[1], to[1])), y.back(Math.min(start[1], to[1]))] });
    });
    root.addEventListener("dblclick", () => options.onZoom({}));
  }

  // From yellow, the lowest loss, to dark blue: the scale Cividis turned round, readable in grey and colour-blind.
  const RAMP = [[253, 231, 55], [203, 186, 105], [148, 142, 119], [102, 105, 112], [54, 74, 108], [0, 34, 78]];
  function shade(part) {
    const at = Math.min(Math.max(part, 0), 1) * (RAMP.length - 1), i = Math.min(Math.floor(at), RAMP.length - 2);
    return "rgb(" + RAMP[i].map((v, n) => Math.round(v + (at - i) * (RAMP[i + 1][n] - v))).join(",") + ")";
  }

  function plane(host, data) {
    if (!host.clientWidth) return;
    const frame = corner(host, 54, host.clientWidth - 64);
    const x = scale(data.lr, true, frame.left + 12, frame.right - 12), y = scale(data.damping, true, frame.bottom - 12, frame.top + 12);
    const root = svg("svg", { width: frame.width, height: host.clientHeight, role: "img", "aria-label": `${data.name}: loss over learning rate and damping` });
    axes(root, frame, x, y, { xLabel: "learning rate", yLabel: "damping" });
    const fine = data.loss.filter((v) => v !== null && v > 0).map(Math.log10), low = Math.min(...fine), high = Math.max(...fine);
    const spots = [];
    data.loss.forEach((loss, i) => {
      const p = [x.at(data.lr[i]), y.at(data.damping[i])], size = data.loss.length > 60 ? 5 : 8;
      if (loss === null) svg("path", { d: MARKERS.x, transform: `translate(${p})`, class: "gone" }, root);
      else svg("circle", { cx: p[0], cy: p[1], r: size, fill: shade((Math.log10(loss) - low) / (high - low || 1)), class: "point" }, root);
      spots.push({ s: data, i, p });
    });
    for (let n = 0; fine.length && n < 40; n++) svg("rect", { x: frame.right + 10, y: frame.bottom - ((n + 1) * (frame.bottom - frame.top)) / 40, width: 10, height: (frame.bottom - frame.top) / 40 + 0.5, fill: shade((n + 0.5) / 40) }, root);
    for (const part of fine.length ? [0, 0.5, 1] : []) text(root, Number((10 ** (low + part * (high - low))).toPrecision(3)), { x: frame.right + 23, y: frame.bottom - part * (frame.bottom - frame.top) + 4, class: "tick" });
    host.replaceChildren(root);
    hover(host, root, frame, spots, (s, i) => [s.text[i], s.loss[i] === null ? "diverged" : `training loss ${s.loss[i].toPrecision(5)}`]);
  }

  function swatch(method) {
    const root = svg("svg", { width: 30, height: 12, "aria-hidden": "true" }), color = ink(method.color);
    svg("path", { d: "M1,6H29", stroke: color, "stroke-dasharray": DASHES[method.variant % DASHES.length], class: "line" }, root);
    svg("path", { d: MARKERS[method.marker] || MARKERS.o, transform: "translate(15,6)", stroke: color, class: "marker" }, root);
    return root;
  }

  return { curves, plane, swatch, short };
})();
