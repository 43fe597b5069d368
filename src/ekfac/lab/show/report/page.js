"use strict";
// Draws the charts of the page from the data that stands in it; asks for new data where a server offers some.
(function () {
  const RULES = {
    final: "best setting at the end",
    per_epoch: "best setting for each epoch",
    per_time: "best setting for each time budget",
    validation: "best setting by validation",
  };
  // Plotly's own button would send the chart to its makers' server; the page must not even offer it.
  const CONFIG = {
    displaylogo: false, responsive: true, showSendToCloud: false, plotlyServerURL: "",
    modeBarButtonsToRemove: ["select2d", "lasso2d"],
  };
  const main = document.getElementById("content");
  const views = new Map();

  function element(tag, attributes, ...children) {
    const found = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "html") found.innerHTML = value; // escaped where it was written
      else if (name in found) found[name] = value;
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

  // The axis that a rule goes with; the whole curve of one setting goes with any.
  const axisOf = (rule, x) => ({ per_epoch: "epoch", per_time: "seconds" })[rule] || x;

  function traces(chart, state) {
    const x = axisOf(state.rule, state.x);
    const floor = state.above ? chart.floor[state.metric.split("_")[0]] || 0 : 0;
    const found = [];
    for (const method of chart.methods) {
      const rules = method.curves[state.rule] || method.curves.final;
      const points = (rules[state.metric] || {})[x];
      if (!points) continue;
      const shift = (values) => values.map((v) => (v === null ? null : v - floor));
      const percent = state.metric.endsWith("accuracy");
      found.push({
        type: "scatter",
        mode: "lines+markers",
        name: method.name,
        legendgroup: method.name,
        x: points.x,
        y: shift(points.y),
        customdata: points.text,
        line: { color: method.color, dash: method.dash, width: 2, shape: state.rule === "per_time" ? "hv" : "linear" },
        marker: { symbol: method.symbol, size: 7, maxdisplayed: 40 },
        hovertemplate:
          "<b>%{fullData.name}</b><br>" + chart.axes[x] + " %{x:.4~g}<br>" + chart.metrics[state.metric] +
          (floor ? " above its floor" : "") + (percent ? " %{y:.2%}" : " %{y:.5~g}") + "<br>%{customdata}<extra></extra>",
      });
      if (points.low) {
        found.push({
          type: "scatter",
          mode: "lines",
          legendgroup: method.name,
          showlegend: false,
          hoverinfo: "skip",
          x: points.x.concat(points.x.slice().reverse()),
          y: shift(points.high).concat(shift(points.low).reverse()),
          fill: "toself",
          fillcolor: method.color,
          opacity: 0.18,
          line: { width: 0 },
        });
      }
    }
    return found;
  }

  function layout(chart, state) {
    const x = axisOf(state.rule, state.x);
    const percent = state.metric.endsWith("accuracy");
    const floor = state.above && chart.floor[state.metric.split("_")[0]];
    const revision = [x, state.metric, state.logX, state.logY, state.above].join();
    return {
      margin: { l: 70, r: 20, t: 10, b: 50 },
      hovermode: "closest",
      legend: { orientation: "h", y: -0.16, uirevision: "keep" },
      uirevision: "keep",
      xaxis: { title: { text: chart.axes[x] }, type: state.logX ? "log" : "linear", uirevision: revision, zeroline: false },
      yaxis: {
        title: { text: chart.metrics[state.metric] + (floor ? " above its floor of " + floor.toPrecision(4) : "") },
        type: state.logY && !percent ? "log" : "linear",
        tickformat: percent ? ".0%" : ".3~g",
        uirevision: revision,
      },
    };
  }

  function drawPlane(div, plane) {
    const fine = plane.loss.map((v, i) => i).filter((i) => plane.loss[i] !== null);
    const gone = plane.loss.map((v, i) => i).filter((i) => plane.loss[i] === null);
    const pick = (values, which) => which.map((i) => values[i]);
    const losses = pick(plane.loss, fine);
    const logs = losses.map((v) => Math.log10(v));
    const low = Math.min(...logs), high = Math.max(...logs);
    const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => low + share * (high - low));
    Plotly.react(
      div,
      [
        {
          type: "scatter", mode: "markers", name: "loss", showlegend: false,
          x: pick(plane.lr, fine), y: pick(plane.damping, fine),
          customdata: fine.map((i) => [plane.text[i], plane.loss[i].toPrecision(5)]),
          marker: {
            size: fine.length > 60 ? 9 : 15, color: logs, colorscale: "Cividis", reversescale: true, line: { width: 0.5, color: "#000" },
            colorbar: { title: { text: "loss" }, tickvals: ticks, ticktext: ticks.map((v) => (10 ** v).toPrecision(3)), thickness: 12 },
          },
          hovertemplate: "%{customdata[0]}<br>training loss %{customdata[1]}<extra></extra>",
        },
        {
          type: "scatter", mode: "markers", name: "diverged", showlegend: gone.length > 0,
          x: pick(plane.lr, gone), y: pick(plane.damping, gone), customdata: pick(plane.text, gone),
          marker: { symbol: "x", size: 8, color: "#D55E00" }, hovertemplate: "%{customdata}<br>diverged<extra></extra>",
        },
      ],
      {
        title: { text: plane.name, font: { size: 14 } }, margin: { l: 70, r: 10, t: 40, b: 50 }, uirevision: "keep",
        legend: { orientation: "h", y: -0.25 },
        xaxis: { type: "log", title: { text: "learning rate" }, exponentformat: "power", dtick: 1 },
        yaxis: { type: "log", title: { text: "damping" }, exponentformat: "power", dtick: 1 },
      },
      CONFIG,
    );
  }

  function build(section) {
    const has = (rule) => section.chart.methods.some((m) => m.curves[rule]);
    const rules = Object.fromEntries(Object.entries(RULES).filter(([rule]) => has(rule)));
    const metric = Object.keys(section.chart.metrics)[0];
    const view = { section, state: { x: "epoch", metric, rule: "final", logX: false, logY: true, above: false } };
    const change = (name) => (value) => { view.state[name] = value; draw(view); };
    const controls = element("div", { className: "controls" });
    controls.append(
      choice("show", section.chart.metrics, view.state.metric, change("metric")),
      choice("by", section.chart.axes, view.state.x, change("x")),
      choice("of the", rules, view.state.rule, change("rule")),
      tick("log x", view.state.logX, change("logX")),
      tick("log y", view.state.logY, change("logY")),
    );
    if (Object.keys(section.chart.floor).length) controls.append(tick("above the floor", view.state.above, change("above")));
    view.chart = element("div", { className: "chart" });
    view.headline = element("p", { className: "headline" });
    view.best = element("div", { className: "scroll" });
    view.ratios = element("div");
    view.planes = element("div", { className: "planes" });
    view.planesTitle = element("h3", { textContent: "Sensitivity: final training loss over learning rate and damping" });
    main.append(
      element("h2", { textContent: section.name }), view.headline, controls, view.chart,
      element("p", { className: "note", textContent: "Click a name in the legend to hide its curve, twice to see it alone; drag to zoom, double-click to zoom out." }),
      element("h3", { textContent: "Best settings" }), view.best, view.ratios, view.planesTitle, view.planes,
    );
    return view;
  }

  function draw(view) {
    const { section } = view;
    view.headline.innerHTML = section.headline;
    view.best.innerHTML = section.best;
    view.ratios.innerHTML = section.ratios
      ? "<h3>Time to a baseline's final training loss</h3><div class=scroll>" + section.ratios + "</div>" +
        "<p class=note>As a share of what the baseline itself takes: 0.50 is twice as fast.</p>"
      : "";
    Plotly.react(view.chart, traces(section.chart, view.state), layout(section.chart, view.state), CONFIG);
    view.planesTitle.hidden = !section.planes.length;
    while (view.planes.children.length < section.planes.length) view.planes.append(element("div", { className: "plane" }));
    section.planes.forEach((plane, i) => drawPlane(view.planes.children[i], plane));
  }

  const footer = element("footer");
  document.body.append(footer);

  function show(data) {
    if (!data.sections.length && !views.size) main.textContent = "No run has a record yet.";
    else if (!views.size) main.textContent = "";
    for (const section of data.sections) {
      if (!views.has(section.name)) views.set(section.name, build(section));
      const view = views.get(section.name);
      view.section = section;
      draw(view);
    }
    if (footer.dataset.shown !== data.footer) {
      footer.innerHTML = data.footer;
      footer.dataset.shown = data.footer;
    }
  }

  const data = JSON.parse(document.getElementById("data").textContent);
  show(data);
  if (data.refresh) {
    setInterval(() => {
      fetch("data.json")
        .then((answer) => answer.json())
        .then(show)
        .catch(() => { document.title = "(not connected) ekfac"; });
    }, 1000 * data.refresh);
  }
})();
