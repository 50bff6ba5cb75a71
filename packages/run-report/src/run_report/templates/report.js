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
    let seen = low;
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width * WIDTH;
      point(low + (x - LEFT) / (WIDTH - LEFT - RIGHT) * (high - low), event.clientY, box);
    });
    // With the keyboard: a step of the longest curve to the left or right.
    svg.tabIndex = 0;
    svg.addEventListener("blur", leave);
    svg.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") leave();
      if (!way) return;
      event.preventDefault();
      const steps = series.map((s) => s.p).reduce((a, b) => b.length > a.length ? b : a).map((p) => p[0]);
      const at = tip ? steps.indexOf(steps.reduce((a, b) => Math.abs(b - seen) < Math.abs(a - seen) ? b : a)) + way : 0;
      const box = svg.getBoundingClientRect();
      point(steps[Math.max(0, Math.min(steps.length - 1, at))], box.top + box.height / 3, box);
    });
    const point = (wanted, clientY, box) => {
      const near = (points) => points.reduce((a, b) => Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a);
      const steps = series.map((s) => near(s.p));
      const step = near(steps)[0];
      seen = step;
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
      tip.style.top = `${clientY - figure.getBoundingClientRect().top - 14}px`;
    };
  }

  // Pictures: Tab goes from strip to strip, arrows from tile to tile, Enter or a click shows one large.
  const tiles = [...document.querySelectorAll(".strip .t:not(.none)")], large = document.getElementById("large");
  const shown = () => tiles.filter((tile) => tile.offsetParent !== null);
  let current = null;
  const enlarge = (tile) => {
    current = tile;
    const copy = tile.cloneNode();
    copy.removeAttribute("tabindex");
    copy.removeAttribute("title");
    large.querySelector(".t").replaceWith(copy);
    large.querySelector("p").textContent = tile.title;
    if (!large.open) large.showModal();
  };
  const neighbour = (tile, key) => {
    const all = shown(), i = all.indexOf(tile), strip = tile.parentElement;
    if (key === "ArrowRight" || key === "ArrowLeft") return all[i + (key === "ArrowRight" ? 1 : -1)];
    const column = [...strip.children].indexOf(tile), down = key === "ArrowDown";
    const others = down ? all.slice(i + 1) : all.slice(0, i).reverse();
    return others.find((t) => t.parentElement !== strip && [...t.parentElement.children].indexOf(t) === column);
  };
  for (const tile of tiles) {
    tile.tabIndex = tile === tile.parentElement.querySelector(".t:not(.none)") ? 0 : -1;
    tile.setAttribute("role", "button");
    tile.setAttribute("aria-label", tile.title);
    tile.addEventListener("click", () => enlarge(tile));
  }
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const tile = large.open ? current : event.target.closest(".strip .t");
    const next = tile && event.key.startsWith("Arrow") && neighbour(tile, event.key);
    if (next) {
      event.preventDefault();
      if (large.open) enlarge(next); else next.focus();
    } else if (tile && !large.open && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      enlarge(tile);
    } else if (!large.open && (event.key === "j" || event.key === "k")) {  // the next or the previous section
      const tops = [...document.querySelectorAll("section")].map((s) => [s, s.getBoundingClientRect().top]);
      const to = event.key === "j" ? tops.find(([, top]) => top > 40) : tops.reverse().find(([, top]) => top < -1);
      to?.[0].scrollIntoView();
    }
  });
  large.addEventListener("close", () => current?.focus());

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
