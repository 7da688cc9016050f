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
  function label() { button.textContent = dark() ? "Light page" : "Dark page"; }
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

  // The contents are open beside the text, and folded above it on a narrow screen.
  var contents = document.querySelector("nav.contents details");
  var wide = window.matchMedia("(min-width: 66rem)");
  function place() { contents.open = wide.matches; }
  place();
  wide.addEventListener("change", place);
  contents.addEventListener("click", function (event) {
    if (!wide.matches && event.target.closest("a")) { contents.open = false; }
  });

  // Claims are found by words, verdict and paper; what holds none of those found is hidden.
  var form = document.querySelector("form.search"), main = document.querySelector("main");
  var papers = Array.from(document.querySelectorAll("details.fold[id^='paper-']"));
  var claims = Array.from(document.querySelectorAll("details.claim")).map(function (row) {
    return { row: row, paper: row.closest("details.fold"), list: row.closest("details.claims"), text: row.textContent.toLowerCase() };
  });
  function filter() {
    var words = form.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    var outcome = form.elements.outcome.value, paper = form.elements.paper.value;
    var searching = Boolean(words.length || outcome || paper), shown = 0, holders = new Set();
    claims.forEach(function (one) {
      var fits = (!outcome || one.row.classList.contains(outcome)) && (!paper || one.paper.id === "paper-" + paper) &&
        words.every(function (word) { return one.text.indexOf(word) >= 0; });
      one.row.hidden = !fits;
      if (fits) { shown += 1; holders.add(one.paper).add(one.list); }
    });
    main.classList.toggle("searching", searching);
    papers.forEach(function (part) {
      part.hidden = !holders.has(part);
      part.open = searching && holders.has(part);
      part.querySelectorAll("details.claims").forEach(function (list) {
        list.parentElement.hidden = !holders.has(list);
        list.open = searching && holders.has(list);
      });
    });
    form.querySelector("output").textContent = searching ? shown + " of " + claims.length + " claims" : claims.length + " claims";
  }
  if (form) { // a page of one training has none
    form.hidden = false;
    form.addEventListener("submit", function (event) { event.preventDefault(); });
    form.addEventListener("input", filter);
    filter();
  }
  document.querySelectorAll("a[data-outcome]").forEach(function (link) {
    link.addEventListener("click", function () {
      form.elements.text.value = "";
      form.elements.outcome.value = link.dataset.outcome;
      form.elements.paper.value = link.dataset.paper;
      filter();
    });
  });

  // An address opens every fold that it lies in.
  function reveal() {
    var target = document.getElementById(decodeURIComponent(window.location.hash.slice(1)));
    if (!target) { return; }
    if (target.closest("[hidden]")) { form.reset(); filter(); }
    for (var part = target; part; part = part.parentElement) {
      if (part.tagName === "DETAILS" && part !== contents) { part.open = true; }
    }
    target.scrollIntoView();
  }
  window.addEventListener("hashchange", reveal);
  reveal();
  main.addEventListener("click", function (event) {
    var claim = event.target.closest("details.claim > summary");
    if (claim && !claim.parentElement.open) { window.history.replaceState(null, "", "#" + claim.parentElement.id); }
  });

  // What is wider than its place says that it scrolls, and fades where it goes on.
  var scrollers = Array.from(document.querySelectorAll(".plot, .scroll"));
  function mark(part) {
    var hidden = part.scrollWidth - part.clientWidth;
    if (hidden > 2) { part.dataset.scroll = hidden - part.scrollLeft > 2 ? "more" : "end"; } else { delete part.dataset.scroll; }
  }
  function markAll() { scrollers.forEach(mark); }
  scrollers.forEach(function (part) { part.addEventListener("scroll", function () { mark(part); }, { passive: true }); });
  window.addEventListener("resize", markAll);
  main.addEventListener("toggle", markAll, true);
  markAll();

  // Print gives a summary and what the reader has opened; this button prints everything.
  var whole = document.getElementById("whole"), folded = [];
  whole.hidden = false;
  whole.addEventListener("click", function () {
    folded = Array.from(document.querySelectorAll("details:not([open])"));
    folded.forEach(function (part) { part.open = true; });
    root.dataset.print = "whole";
    window.print();
  });
  window.addEventListener("afterprint", function () {
    folded.forEach(function (part) { part.open = false; });
    folded = [];
    delete root.dataset.print;
  });
})();
