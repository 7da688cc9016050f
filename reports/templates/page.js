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
})();
