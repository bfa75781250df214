"use strict";
(() => {
  const page = document.documentElement;
  page.classList.add("scripted");
  const all = (query, root = document) => [...root.querySelectorAll(query)];
  const { names, colors } = JSON.parse(document.getElementById("runs").textContent);
  const hidden = new Set();

  // Curves that coincide draw their line in turns, dash by dash: those that are shown share it.
  const share = (plot) => {
    const groups = {};
    all(".curve[data-share]:not(.out)", plot).forEach((curve) => {
      const [group, on, pitch] = curve.dataset.share.split(" ").map(Number);
      (groups[group] ??= []).push({ curve, on, pitch });
    });
    Object.values(groups).forEach((group) => group.forEach(({ curve, on, pitch }, turn) => {
      const path = curve.querySelector("path");
      path.style.strokeDasharray = `${on} ${pitch * group.length - on}`;
      path.style.strokeDashoffset = -pitch * turn;
    }));
  };

  // Legend: a click switches a run, the pointer over it brings its curves to the front.
  all(".legend label").forEach((label, run) => {
    const curves = all(`.curve[data-run="${run}"]`);
    label.querySelector("input").addEventListener("change", (event) => {
      hidden[event.target.checked ? "delete" : "add"](run);
      [label, ...curves].forEach((e) => e.classList.toggle("out", hidden.has(run)));
      all(".plot").forEach(share);
    });
    const focus = (on) => {
      page.classList.toggle("one-run", on);
      curves.forEach((curve) => curve.classList.toggle("on", on));
    };
    label.addEventListener("pointerenter", () => focus(true));
    label.addEventListener("pointerleave", () => focus(false));
  });

  const number = (value, percent) => {
    if (value === null) return "not finite";
    if (percent) return (100 * value).toPrecision(3) + "%";
    const size = Math.abs(value);
    if (size >= 1000) return Math.round(value).toLocaleString("en-US");
    return size !== 0 && size < 1e-3 ? value.toExponential(3) : String(+value.toPrecision(5));
  };
  const clock = (s) => {
    const part = (n) => String(Math.floor(n)).padStart(2, "0");
    return `${Math.floor(s / 3600)}:${part((s / 60) % 60)}:${part(s % 60)}`;
  };
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };

  // Charts: a cross-hair at the nearest report, and what every run had there.
  all(".plot").forEach((plot) => {
    const svg = plot.querySelector("svg");
    const cross = plot.querySelector(".cross");
    const data = JSON.parse(plot.querySelector("script").textContent);
    const [low, high, start, end] = data.x;
    const tip = plot.appendChild(document.createElement("div"));
    tip.className = "tip";

    const leave = () => { cross.style.visibility = "hidden"; tip.style.display = "none"; };
    const move = (event) => {
      const box = svg.getBoundingClientRect();
      const scale = svg.viewBox.baseVal.width / box.width;
      const at = low + (((event.clientX - box.left) * scale - start) / (end - start)) * (high - low);
      const shown = data.curves.filter((curve) => !hidden.has(curve.run) && curve.x.length);
      if (!shown.length) return leave();
      const found = shown.map((curve) => ({ curve, i: nearest(curve.x, at) }));
      const x = found
        .map(({ curve, i }) => curve.x[i])
        .reduce((a, b) => (Math.abs(a - at) <= Math.abs(b - at) ? a : b));
      const px = start + ((x - low) / (high - low)) * (end - start);
      cross.setAttribute("x1", px);
      cross.setAttribute("x2", px);
      cross.style.visibility = "visible";

      const title = document.createElement("b");
      title.textContent = data.axis === "time" ? clock(x) : `${data.axis} ${x.toLocaleString("en-US")}`;
      const several = new Set(shown.map((curve) => curve.split)).size > 1;
      // A run without a report near the cross-hair has nothing to say there.
      const near = (high - low) / 25;
      const lines = found
        .filter(({ curve, i }) => Math.abs(curve.x[i] - x) <= near)
        .sort((a, b) => (b.curve.y[b.i] ?? -Infinity) - (a.curve.y[a.i] ?? -Infinity))
        .map(({ curve, i }) => {
          const line = document.createElement("div");
          line.className = `c${curve.run % colors}`;
          const swatch = document.createElement("span");
          swatch.className = "swatch";
          const name = document.createElement("span");
          name.textContent = names[curve.run] + (several ? ` (${curve.split})` : "");
          const value = document.createElement("span");
          value.textContent = number(curve.y[i], data.percent);
          line.append(swatch, name, value);
          return line;
        });
      tip.replaceChildren(title, ...lines);
      tip.style.display = "block";
      const left = px / scale;
      const flip = left + tip.offsetWidth + 24 > box.width;
      tip.style.left = `${Math.max(0, flip ? left - tip.offsetWidth - 12 : left + 12)}px`;
      tip.style.top = "8px";
    };
    const field = plot.querySelector(".field");
    field.addEventListener("pointermove", move);
    field.addEventListener("pointerdown", move);
    field.addEventListener("pointerleave", leave);
  });
})();
