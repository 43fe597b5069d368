"use strict";
// Builds the page from the data that stands in it; asks for new data where a server offers some.
(function () {
  const RULES = { final: "best setting at the end", envelope: "best setting at each point", validation: "best setting by validation" };
  const main = document.getElementById("content"), contents = document.getElementById("contents");
  const footer = document.querySelector("footer"), theme = document.getElementById("theme");
  const views = new Map();

  function element(tag, attributes, ...children) {
    const found = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name in found) found[name] = value;
      else found.setAttribute(name, value);
    }
    found.append(...children);
    return found;
  }

  function choice(title, options, value, onChange) {
    const select = element("select", { ariaLabel: title });
    for (const [key, label] of Object.entries(options)) select.append(element("option", { value: key, textContent: label }));
    select.value = value;
    select.addEventListener("change", () => onChange(select.value));
    return element("label", {}, title, select);
  }

  function tick(title, checked, onChange) {
    const box = element("input", { type: "checkbox", checked });
    box.addEventListener("change", () => onChange(box.checked));
    return element("label", {}, box, title);
  }

  function copy(words) {
    const button = element("button", { className: "copy", textContent: "copy", title: "Copy the command" });
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(words);
      } catch {
        const field = element("textarea", { value: words }); // without permission, by the old way
        document.body.append(field);
        field.select();
        document.execCommand("copy");
        field.remove();
      }
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
    return button;
  }

  // A table of cells {text, value}; a click on a head sorts by its column, a second one the other way round.
  function table(data, order) {
    const body = element("tbody"), head = element("tr");
    const found = element("table", {}, element("thead", {}, head), body);
    const side = (place) => (data.numeric[place] ? "number" : "");
    function fill() {
      const rows = data.rows.slice(), at = order.column;
      const key = (row) => (data.numeric[at] ? row[at].value ?? Infinity : row[at].text.toLowerCase());
      if (at !== null && at < data.heads.length) rows.sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * order.sign);
      body.replaceChildren(...rows.map((row) => element("tr", {}, ...row.map((cell, place) => element("td", { className: side(place), textContent: cell.text, "data-head": data.heads[place] })))));
      [...head.children].forEach((cell, place) => cell.setAttribute("aria-sort", place === at ? (order.sign > 0 ? "ascending" : "descending") : "none"));
    }
    data.heads.forEach((title, place) => {
      const button = element("button", { textContent: title, title: "Sort by this column" });
      button.addEventListener("click", () => {
        order.sign = order.column === place ? -order.sign : 1;
        order.column = place;
        fill();
      });
      head.append(element("th", { className: side(place), scope: "col" }, button));
    });
    fill();
    return element("div", { className: "scroll" }, found);
  }

  function series(view) {
    const { section: { chart }, state } = view, percent = state.metric.endsWith("accuracy");
    const found = [];
    for (const method of chart.methods) {
      if (view.hidden.has(method.name)) continue;
      const points = ((method.curves[state.rule] || method.curves.final)[state.metric] || {})[state.x];
      if (!points) continue;
      const floor = state.above && points.floor && !percent ? points.floor[state.metric.split("_")[0]] || 0 : 0;
      const shift = (values) => values && values.map((v) => (v === null ? null : v - floor));
      found.push({ ...method, stairs: state.rule === "envelope" && state.x !== "epoch", x: points.x, y: shift(points.y), low: shift(points.low), high: shift(points.high), points });
    }
    return found;
  }

  function drawChart(view) {
    const { section: { chart }, state } = view, percent = state.metric.endsWith("accuracy");
    const above = state.above && chart.floor && !percent ? " above its floor" : "";
    const write = (value) => (percent ? (100 * value).toFixed(2) + " %" : Number(value.toPrecision(5)));
    view.drawn = charts.curves(view.chart, series(view), {
      xLabel: chart.axes[state.x], xWhole: state.x !== "seconds", yLabel: chart.metrics[state.metric] + above, logX: state.logX, logY: state.logY && !percent,
      yFormat: percent ? (v) => Number((100 * v).toPrecision(4)) + " %" : undefined, zoom: view.zoom,
      onZoom: (zoom) => { view.zoom = zoom; drawChart(view); },
      describe: (s, i) => [s.name, `${chart.axes[state.x]} ${charts.short(s.x[i])}`, `${chart.metrics[state.metric]}${above} ${write(s.y[i])}`, s.points.settings[s.points.which ? s.points.which[i] : 0]],
    });
    view.chart.drawn = view.drawn;
  }

  function drawLegend(view) {
    const methods = view.section.chart.methods;
    view.legend.replaceChildren(...methods.map((method) => {
      const button = element("button", { className: "entry", title: "Show or hide; twice: this one alone" }, charts.swatch(method), method.name);
      button.setAttribute("aria-pressed", String(!view.hidden.has(method.name)));
      const change = () => { drawLegend(view); drawChart(view); };
      button.addEventListener("click", (event) => {
        if (event.detail > 1) view.hidden = new Set(methods.map((m) => m.name).filter((name) => name !== method.name));
        else if (!view.hidden.delete(method.name)) view.hidden.add(method.name);
        change();
      });
      return button;
    }));
    if (methods.length > 1) {
      const all = view.hidden.size > 0, button = element("button", { className: "entry all", textContent: all ? `show all ${methods.length}` : "hide all" });
      button.addEventListener("click", () => { view.hidden = new Set(all ? [] : methods.map((m) => m.name)); drawLegend(view); drawChart(view); });
      view.legend.append(button);
    }
  }

  function drawTimes(view) {
    const { times, about_times } = view.section;
    view.timesNote.textContent = about_times;
    view.times.hidden = !times;
    if (!times) return;
    if (!times.methods.includes(view.rival)) view.rival = times.first;
    const goal = `${view.rival}'s ${view.goal === "final" ? "final loss" : "lowest loss"}`;
    const shares = times.shares[`${view.rival}|${view.goal}`];
    const cell = (value) => (value === null ? { text: times.without } : { text: value.toPrecision(3), value });
    const data = {
      heads: [...times.table.heads, "share of its epochs", "share of its time"], numeric: [...times.table.numeric, true, true],
      rows: times.table.rows.map((row, i) => [...row, cell(shares[i][0]), cell(shares[i][1])]),
    };
    const names = Object.fromEntries(times.methods.map((name) => [name, name]));
    view.times.replaceChildren(
      element("h3", { textContent: `Time to ${goal}` }),
      element("div", { className: "controls" },
        choice("to the loss of", names, view.rival, (value) => { view.rival = value; drawTimes(view); }),
        choice("at its", { final: "end", lowest: "lowest" }, view.goal, (value) => { view.goal = value; drawTimes(view); })),
      table(data, view.timesOrder),
      element("p", { className: "note", textContent: `How soon each is at ${goal}, as a share of what ${view.rival} itself takes to get there: 0.5 is twice as fast.` }),
    );
  }

  function build(section) {
    const { chart } = section, has = (rule) => chart.methods.some((m) => m.curves[rule]);
    const metric = Object.keys(chart.metrics)[0];
    const view = {
      section, zoom: {}, hidden: new Set(chart.methods.filter((m) => !m.shown).map((m) => m.name)), seen: new Set(),
      state: { x: "epoch", metric, rule: "final", logX: false, logY: true, above: chart.floor },
      order: { column: null, sign: 1 }, timesOrder: { column: null, sign: 1 }, rival: null, goal: "final",
    };
    const change = (name) => (value) => { view.state[name] = value; view.zoom = {}; drawChart(view); };
    const controls = element("div", { className: "controls" },
      choice("show", chart.metrics, metric, change("metric")), choice("by", chart.axes, view.state.x, change("x")),
      choice("of the", Object.fromEntries(Object.entries(RULES).filter(([rule]) => has(rule))), "final", change("rule")),
      tick("log x", false, change("logX")), tick("log y", true, change("logY")));
    if (chart.floor) controls.append(tick("above the floor", true, change("above")));
    view.headline = element("p", { className: "headline" });
    view.chart = element("div", { className: "chart" });
    view.legend = element("div", { className: "legend" });
    view.best = element("div");
    view.times = element("div");
    view.timesNote = element("p", { className: "note" });
    view.planes = element("div", { className: "planes" });
    view.planesTitle = element("h3");
    view.heading = element("h2", { id: section.id });
    main.append(element("section", {},
      view.heading, view.headline, controls, view.chart, view.legend,
      element("p", { className: "note", textContent: "Click a name to show or hide its curve, twice to see it alone; drag to zoom, double-click to zoom out. Bands go from the lowest to the highest seed." }),
      element("h3", { textContent: "Best settings" }), view.best, view.times, view.timesNote, view.planesTitle, view.planes));
    new ResizeObserver(() => redraw(view)).observe(view.chart);
    return view;
  }

  function redraw(view) {
    drawChart(view);
    view.section.planes.forEach((plane, i) => charts.plane(view.planes.children[i].lastChild, plane));
  }

  function update(view) {
    const { section } = view;
    for (const method of section.chart.methods) { // one that comes later is shown as it wishes
      if (view.seen.size && !view.seen.has(method.name) && !method.shown) view.hidden.add(method.name);
      view.seen.add(method.name);
    }
    view.heading.textContent = section.name;
    view.headline.textContent = section.headline;
    view.best.replaceChildren(table(section.best, view.order));
    view.planesTitle.hidden = !section.planes.length;
    view.planesTitle.textContent = section.about_planes;
    while (view.planes.children.length < section.planes.length) view.planes.append(element("div", {}, element("h4"), element("div", { className: "plane" })));
    section.planes.forEach((plane, i) => { view.planes.children[i].firstChild.textContent = plane.name; });
    drawLegend(view);
    drawTimes(view);
    redraw(view);
  }

  function drawFooter(data) {
    const list = (items) => element("ul", {}, ...items.map((line) => element("li", { textContent: line })));
    const lines = data.commands.map(([status, words]) => element("li", {}, copy(words), element("span", { className: `status ${status}`, textContent: status }), element("code", { textContent: words })));
    const count = `${lines.length} run${lines.length === 1 ? "" : "s"}, each with the command that repeats it`;
    const all = element("details", { open: lines.length <= 12 }, element("summary", { textContent: count }), element("ul", { className: "commands" }, ...lines));
    const many = element("details", { open: data.machines.length <= 4 }, element("summary", { textContent: `${data.machines.length} of them` }), list(data.machines));
    footer.replaceChildren(
      element("h2", { id: "machine", textContent: "Machine and versions" }), data.machines.length ? many : list(["not recorded"]),
      element("h2", { id: "commands", textContent: "Commands" }), all);
  }

  function show(data) {
    if (!data.sections.length && !views.size) main.textContent = "No run has a record yet.";
    else if (!views.size) main.textContent = "";
    for (const section of data.sections) {
      if (!views.has(section.id)) views.set(section.id, build(section));
      views.get(section.id).section = section;
      update(views.get(section.id));
    }
    const entries = [...data.sections.map((s) => [s.id, s.name]), ["machine", "Machine and versions"], ["commands", "Commands"]];
    contents.replaceChildren(element("ul", {}, ...entries.map(([id, name]) => element("li", {}, element("a", { href: `#${id}`, textContent: name })))));
    const known = JSON.stringify([data.machines, data.commands]);
    if (footer.known !== known) drawFooter(data);
    footer.known = known;
  }

  const dark = matchMedia("(prefers-color-scheme: dark)");
  function themed() {
    const now = document.documentElement.dataset.theme || (dark.matches ? "dark" : "light");
    theme.textContent = now === "dark" ? "light" : "dark";
    theme.onclick = () => { document.documentElement.dataset.theme = now === "dark" ? "light" : "dark"; themed(); };
    for (const view of views.values()) { drawLegend(view); redraw(view); }
  }
  dark.addEventListener("change", themed);

  const data = JSON.parse(document.getElementById("data").textContent);
  show(data);
  themed();
  if (data.refresh) {
    setInterval(() => {
      fetch("data.json")
        .then((answer) => answer.json())
        .then(show)
        .catch(() => { document.title = "(not connected) ekfac"; });
    }, 1000 * data.refresh);
  }
})();
