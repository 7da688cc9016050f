(function () {
  "use strict";
  var root = document.documentElement;
  var button = document.getElementById("theme");
  var system = window.matchMedia("(prefers-color-scheme: dark)");
  function remembered() {
    try { return window.localStorage.getItem("mlm-report-theme"); } catch (error) { return null; }
  }
  function dark() {
    var chosen = root.getAttribute("data-theme");
    return chosen ? chosen === "dark" : system.matches;
  }
  function label() {
    button.textContent = dark() ? "Light page" : "Dark page";
  }
  var before = remembered();
  if (before === "dark" || before === "light") { root.setAttribute("data-theme", before); }
  button.hidden = false;
  label();
  system.addEventListener("change", label);
  button.addEventListener("click", function () {
    var next = dark() ? "light" : "dark";
    root.setAttribute("data-theme", next);
    try { window.localStorage.setItem("mlm-report-theme", next); } catch (error) { /* not kept */ }
    label();
  });

  var claims = document.getElementById("claims");
  var rows = Array.from(claims.querySelectorAll("tbody tr"));
  var texts = rows.map(function (row) { return row.textContent.toLowerCase(); });
  var search = document.getElementById("claim-search");
  var outcome = document.getElementById("claim-outcome");
  var whole = "experiment:";
  function filter() {
    var words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    var shown = 0;
    rows.forEach(function (row, place) {
      var fits = (!outcome.value || row.dataset.outcome === outcome.value) && words.every(function (word) {
        return word.indexOf(whole) ? texts[place].indexOf(word) >= 0 : row.dataset.experiment === word.slice(whole.length);
      });
      row.hidden = !fits;
      shown += fits ? 1 : 0;
    });
    document.getElementById("claim-count").textContent = shown + " of " + rows.length;
  }
  search.addEventListener("input", filter);
  outcome.addEventListener("change", filter);
  claims.querySelector(".filter").hidden = false;
  filter();
  document.querySelectorAll(".outcomes a[data-outcome]").forEach(function (link) {
    link.addEventListener("click", function () {
      claims.open = true;
      search.value = whole + link.dataset.experiment;
      outcome.value = link.dataset.outcome;
      filter();
    });
  });
})();
