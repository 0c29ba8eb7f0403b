// What a reader would complain about on the page that is shown: a list of sentences.
(() => {
  const faults = [];
  const say = (what, element) => faults.push(`${what}: ${(element.textContent || "").trim().slice(0, 60)}`);
  const seen = (element) => element.getClientRects().length > 0 && element.checkVisibility({ visibilityProperty: true });
  const texts = [...document.body.querySelectorAll("*")].filter((element) => seen(element)
    && !["style", "script"].includes(element.localName)
    && [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
  const rects = (element) => {
    if (element.namespaceURI.endsWith("svg")) return [element.getBoundingClientRect()];
    const found = [];
    for (const node of element.childNodes) {
      if (node.nodeType !== 3 || !node.data.trim()) continue;
      const range = document.createRange();
      range.selectNodeContents(node);
      found.push(...range.getClientRects());
    }
    return found;
  };
  const colour = (text) => {  // r, g, b, opacity
    const numbers = text.match(/[\d.]+/g).map(Number);
    return numbers.length > 3 ? numbers : [...numbers, 1];
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const back = colour(getComputedStyle(one).backgroundColor);
      if (back[3] === 1) return back;
    }
    return [255, 255, 255, 1];
  };

  if (document.documentElement.scrollWidth > innerWidth) faults.push(`it scrolls sideways: ${document.documentElement.scrollWidth}`);
  const boxes = [];
  for (const element of texts) {
    const style = getComputedStyle(element), drawn = element.namespaceURI.endsWith("svg");
    const [a, b] = [light(colour(drawn ? style.fill : style.color)), light(behind(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) say(`contrast ${contrast.toFixed(1)}`, element);
    const scrolls = element.closest(".table");
    const frame = drawn ? element.closest("svg").getBoundingClientRect() : { left: 0, right: innerWidth };
    for (const box of rects(element)) {
      if (!scrolls && (box.left < frame.left - 1 || box.right > frame.right + 1)) say("cut off", element);
      if (box.height < (drawn ? 11 : 12)) say(`small: ${box.height.toFixed(1)} pixels`, element);
      boxes.push([element, box]);
    }
    if (!scrolls && !drawn && style.overflowX !== "visible" && element.scrollWidth > element.clientWidth + 1) say("cut off", element);
  }
  boxes.sort((a, b) => a[1].top - b[1].top);
  boxes.forEach(([one, a], index) => {
    for (let next = index + 1; next < boxes.length && boxes[next][1].top < a.bottom - 3; next++) {
      const [other, b] = boxes[next];
      if (one === other || one.contains(other) || other.contains(one)) continue;
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 1 && down > 3) say(`it lies over "${other.textContent.trim().slice(0, 30)}"`, one);
    }
  });
  for (const picture of document.querySelectorAll("svg")) {
    const onPage = picture.getBoundingClientRect().right > 0;  // plotly.js measures text in one beside the page
    if (onPage && !picture.closest("[aria-label]")) say("a picture without words", picture);
  }
  const levels = [...document.querySelectorAll("h1, h2, h3")].map((heading) => Number(heading.localName[1]));
  if (levels[0] !== 1 || levels.filter((level) => level === 1).length !== 1) faults.push("not one main heading");
  if (!document.title || !document.documentElement.lang) faults.push("no title or no language");
  return faults;
})()
