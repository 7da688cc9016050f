document.querySelectorAll("details.examples").forEach(function (part) {
  "use strict";
  var form = part.querySelector("form"), text = form.elements.text, answers = form.elements.answers;
  var rows = Array.from(part.querySelectorAll("tbody tr")).map(function (row) {
    return { row: row, right: row.dataset.right, text: row.textContent.toLowerCase() };
  });
  function fits(right) {
    if (!answers.value) { return true; }
    if (answers.value === "mixed") { return right.indexOf("0") >= 0 && right.indexOf("1") >= 0; }
    return right.charAt(parseInt(answers.value.slice(0, -1), 10)) === answers.value.slice(-1);
  }
  function filter() {
    var wanted = text.value.trim().toLowerCase(), shown = 0;
    rows.forEach(function (one) {
      one.row.hidden = !(fits(one.right) && one.text.indexOf(wanted) >= 0);
      if (!one.row.hidden) { shown += 1; }
    });
    form.querySelector("output").textContent = shown + " of " + rows.length + " examples";
  }
  form.hidden = false;
  form.addEventListener("submit", function (event) { event.preventDefault(); });
  text.addEventListener("input", filter);
  answers.addEventListener("change", filter);
});
