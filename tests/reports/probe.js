var told = [], contents = document.querySelector("nav.contents details");
told.push(contents.open ? "open" : "folded", getComputedStyle(contents.parentElement).position);
function shown() { return document.querySelectorAll("details.claim:not([hidden])").length; }
var form = document.querySelector("form.search"), claim = document.getElementById("2021/figure-12/interleaved/12");
form.elements.text.value = "2021/figure-12 simulated";
form.dispatchEvent(new Event("input"));
told.push(shown(), claim.closest("details.claims").open);
form.elements.outcome.value = "of-others";
form.dispatchEvent(new Event("input"));
told.push(shown());
var cell = document.querySelector("a[data-outcome='predicted']");
cell.click();
told.push(shown() - Number(/\((\d+)/.exec(cell.textContent)[1]));
document.getElementById("theme").click();
told.push(document.documentElement.dataset.theme);
location.hash = "#2019/table-5/roberta/qqp";
window.addEventListener("hashchange", function () {
  var other = document.getElementById("2019/table-5/roberta/qqp");
  told.push(other.open && other.closest("details.fold").open && other.offsetHeight > 0, shown());
  window.print = function () {};
  document.getElementById("whole").click();
  told.push(document.querySelectorAll("details:not([open])").length);
  var clipped = Array.from(document.querySelectorAll(".plot svg text")).filter(function (text) {
    var inner = text.getBoundingClientRect(), outer = text.ownerSVGElement.getBoundingClientRect();
    return inner.width && (inner.left < outer.left - 1 || inner.right > outer.right + 1 ||
      inner.top < outer.top - 1 || inner.bottom > outer.bottom + 1);
  });
  var root = document.documentElement;
  told.push(clipped.length, root.scrollWidth <= window.innerWidth, window.innerWidth);
  parent.postMessage(told.join(" "), "*");
}, { once: true });
