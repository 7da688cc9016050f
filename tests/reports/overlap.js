// Reports text that lies over other text, or sticks out of the box that it stands in.
function textBoxes() {
  var boxes = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), node, range = document.createRange();
  while ((node = walker.nextNode())) {
    var holder = node.parentElement;
    if (!node.data.trim() || holder.closest("script, style, .hidden, .skip, nav.contents")) { continue; }
    var style = getComputedStyle(holder);
    if (style.clipPath !== "none" || !holder.checkVisibility({ visibilityProperty: true })) { continue; }
    range.selectNodeContents(node);
    Array.from(range.getClientRects()).forEach(function (rect) {
      if (rect.width > 1 && rect.height > 1) { boxes.push({ holder: holder, text: node.data.trim().slice(0, 30), rect: visible(rect, holder) }); }
    });
  }
  return boxes.filter(function (box) { return box.rect; });
}
function visible(rect, holder) { // what a part that scrolls shows of it
  var scroller = holder.closest(".scroll, .plot, pre"), left = rect.left, right = rect.right, top = rect.top, bottom = rect.bottom;
  if (scroller) {
    var outer = scroller.getBoundingClientRect();
    left = Math.max(left, outer.left); right = Math.min(right, outer.right);
    top = Math.max(top, outer.top); bottom = Math.min(bottom, outer.bottom);
  }
  return right - left > 1 && bottom - top > 1 ? { left: left, right: right, top: top, bottom: bottom } : null;
}
function faults() {
  var boxes = textBoxes().sort(function (a, b) { return a.rect.top - b.rect.top; }), found = [];
  boxes.forEach(function (one, place) {
    for (var next = place + 1; next < boxes.length && boxes[next].rect.top < one.rect.bottom - 4; next += 1) {
      var other = boxes[next];
      if (one.holder !== other.holder && !(one.holder.closest("thead") || other.holder.closest("thead")) &&
          Math.min(one.rect.right, other.rect.right) - Math.max(one.rect.left, other.rect.left) > 2 &&
          Math.min(one.rect.bottom, other.rect.bottom) - other.rect.top > 4) { found.push(one.text + " over " + other.text); }
    }
    var box = one.holder;
    while (box && (getComputedStyle(box).display === "inline" || box.ownerSVGElement)) { box = box.parentElement; }
    var outer = box.getBoundingClientRect();
    if (one.rect.right > outer.right + 2 || one.rect.left < outer.left - 2) { found.push(one.text + " out of " + box.tagName + "." + box.className); }
  });
  return found;
}
addEventListener("load", function () { parent.postMessage([faults().length].concat(faults().slice(0, 8)).join("; "), "*"); });
