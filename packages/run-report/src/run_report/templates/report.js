(() => {
  "use strict";
  // Light or dark: the system's choice until the button is pressed.
  const root = document.documentElement;
  const store = { get: () => { try { return localStorage.getItem("theme"); } catch { return null; } },
                  set: (v) => { try { localStorage.setItem("theme", v); } catch { /* a file without storage */ } } };
  if (store.get()) root.dataset.theme = store.get();
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    store.set(root.dataset.theme);
  });

  // Charts: the values at the step under the pointer. The plot's margins are those of svg.py.
  const WIDTH = 420, HEIGHT = 216, LEFT = 46, RIGHT = 12, TOP = 12, BOTTOM = 26;
  const show = (v) => Math.abs(v) >= 1e-3 || v === 0 ? String(+v.toPrecision(4)) : v.toExponential(2);
  for (const figure of document.querySelectorAll(".chart")) {
    const svg = figure.querySelector("svg");
    const series = JSON.parse(figure.dataset.series);
    const [low, high] = figure.dataset.range.split(" ").map(Number);
    let tip = null, line = null;
    const leave = () => { tip?.remove(); line?.remove(); tip = line = null; };
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width * WIDTH;
      const wanted = low + (x - LEFT) / (WIDTH - LEFT - RIGHT) * (high - low);
      const near = (points) => points.reduce((a, b) => Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a);
      const steps = series.map((s) => near(s.p));
      const step = near(steps)[0];
      if (!tip) {
        tip = figure.appendChild(Object.assign(document.createElement("div"), { className: "tip" }));
        line = svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "line"));
        line.setAttribute("class", "cursor");
        line.setAttribute("y1", TOP);
        line.setAttribute("y2", HEIGHT - BOTTOM);
      }
      const at = LEFT + (step - low) / ((high - low) || 1) * (WIDTH - LEFT - RIGHT);
      line.setAttribute("x1", at);
      line.setAttribute("x2", at);
      tip.replaceChildren(Object.assign(document.createElement("b"), { textContent: `step ${Math.round(step)}` }));
      series.forEach((s, i) => {
        const when = Math.round(steps[i][0]) === Math.round(step) ? "" : ` (step ${Math.round(steps[i][0])})`;
        tip.append(document.createElement("br"), `${s.l} ${show(steps[i][1])}${when}`);
      });
      const place = at / WIDTH * box.width + svg.offsetLeft;
      const left = place + 12 + tip.offsetWidth > figure.clientWidth ? place - 12 - tip.offsetWidth : place + 12;
      tip.style.left = `${left}px`;
      tip.style.top = `${event.clientY - figure.getBoundingClientRect().top - 14}px`;
    });
  }

  // The table of prompts: sort by a column, the largest change first; the prompt column gives the first order back.
  for (const table of document.querySelectorAll("table.sortable")) {
    const buttons = [...table.querySelectorAll("thead button")];
    buttons.forEach((button, column) => button.addEventListener("click", () => {
      const down = column > 0 && button.getAttribute("aria-sort") !== "descending";
      buttons.forEach((other) => other.removeAttribute("aria-sort"));
      button.setAttribute("aria-sort", down ? "descending" : "ascending");
      const body = table.tBodies[0];
      const value = (row) => Number(row.cells[column].dataset.v);
      [...body.rows].sort((a, b) => (down ? -1 : 1) * (value(a) - value(b))).forEach((row) => body.append(row));
    }));
  }
})();
