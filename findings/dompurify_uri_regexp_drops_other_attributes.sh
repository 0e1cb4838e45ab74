#!/usr/bin/env bash
# ALLOWED_URI_REGEXP of dompurify 3.5.0 is matched with the value of every attribute, not only of those that hold an
# address: with one that allows https only, a cell of a table loses align="right". ADD_URI_SAFE_ATTR brings it back.
# Seen: align is kept without a regexp, lost with one, kept with one and ADD_URI_SAFE_ATTR; the address stays throughout.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts dompurify@3.5.0 jsdom@26.1.0
node - <<'P'
const { JSDOM } = require("jsdom");
const purify = require("dompurify")(new JSDOM("").window);
const text = '<table><tbody><tr><td align="right">1</td></tr></tbody></table><a href="https://a.example">a</a>';
const https = { ALLOWED_URI_REGEXP: /^https:/i };
const made = [{}, https, { ...https, ADD_URI_SAFE_ATTR: ["align"] }].map((options) => purify.sanitize(text, options));
console.log(made.join("\n"));
const seen = made.map((each) => [each.includes('align="right"'), each.includes('href="https://a.example"')]);
process.exit(JSON.stringify(seen) === "[[true,true],[false,true],[true,true]]" ? 0 : 1);
P
