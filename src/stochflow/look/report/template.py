"""The pages' markup and style (jinja2). Colours are variables, and the figures use the same ones."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --page: #fbfbf9; --card: #ffffff; --ink: #1d1f21; --faint: #5f646b; --rule: #d9dbd6; --good: #1d7a46; --bad: #b3372b; --warn: #8f5b00;
  --c1: #1f6fc4; --c2: #c2571a; --c3: #2a8a57; --c4: #8452b8; }
@media (prefers-color-scheme: dark) {
  :root { --page: #15171a; --card: #1c1f23; --ink: #e8e9ea; --faint: #a3a9b1; --rule: #3a3f45; --good: #6fcf97; --bad: #ff8a7d; --warn: #f0b95a;
    --c1: #6cb0ff; --c2: #ff9d5c; --c3: #6fd39c; --c4: #c9a2f5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 1.2rem 1rem 3rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .2rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .7rem; } h3 { font-size: 1rem; margin: 0; }
p { margin: .3rem 0; max-width: 75ch; } .faint, figcaption, .note { color: var(--faint); } .note { font-size: .85rem; }
.verdict { font-size: 1.05rem; } .run + .run { margin-top: 4rem; border-top: 2px solid var(--rule); padding-top: 2rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 155px), 1fr)); gap: .7rem; margin-top: 1rem; }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; } .tile span { font-size: .85rem; color: var(--faint); display: block; line-height: 1.35; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: .8rem .9rem .9rem; min-width: 0; }
figure h3 { margin-bottom: .3rem; } figcaption { font-size: .85rem; line-height: 1.4; margin-top: .4rem; }
svg { display: block; width: 100%; height: auto; } svg text { font-family: system-ui, -apple-system, "Segoe UI", "Helvetica Neue", sans-serif; }
.finding { border-left: 4px solid var(--warn); background: var(--card); padding: .6rem .9rem; margin: .6rem 0; border-radius: 0 8px 8px 0; } .finding.serious { border-color: var(--bad); }
.well { color: var(--good); font-weight: 600; } .ill { color: var(--bad); font-weight: 600; }
.wide { overflow-x: auto; width: fit-content; max-width: 100%; border: 1px solid var(--rule); border-radius: 8px; background: var(--card); }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; } th, td { text-align: left; padding: .35rem .7rem; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--faint); font-weight: 600; white-space: nowrap; } tr:last-child td { border-bottom: 0; } td.n, th.n { text-align: right; white-space: nowrap; } td.verdicts { min-width: 15rem; }
code, pre { font-family: ui-monospace, "SFMono-Regular", Menlo, Consolas, monospace; font-size: .9em; } pre { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: .7rem .9rem; margin: .4rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin-top: .8rem; } summary { cursor: pointer; color: var(--faint); } dl { columns: 15rem; font-size: .88rem; } dl div { break-inside: avoid; display: flex; gap: .5rem; } dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
nav { margin-top: .8rem; } nav a { color: var(--c1); margin-right: 1rem; }
@media print {
  :root { color-scheme: light; --page: #fff; --card: #fff; --ink: #000; --faint: #444; --rule: #ccc; --good: #1d7a46; --bad: #b3372b; --warn: #8f5b00;
    --c1: #1f6fc4; --c2: #c2571a; --c3: #2a8a57; --c4: #8452b8; }
  body { font-size: 10pt; } figure, .finding, .tile, tr { break-inside: avoid; } h2, h3, h2 + .note { break-after: avoid; } .run { break-before: page; } .run:first-of-type { break-before: auto; }
  details { display: none; } nav { display: none; }
  main { padding: 0; max-width: none; } .panels { grid-template-columns: 1fr 1fr; gap: .5rem; } .tiles { grid-template-columns: repeat(4, 1fr); }
  .wide { overflow: visible; border: 0; } table { font-size: 8pt; } th { white-space: normal; } th, td { padding: .15rem .4rem; } }
"""

FIGURE = """{% macro figure(panel) %}
<figure class="{{ panel.key }}"><h3>{{ panel.title }}</h3>{{ panel.svg|safe }}<figcaption>{{ panel.caption }}</figcaption></figure>
{% endmacro %}"""

PAGE = """{% from "figure" import figure %}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }} · stochflow</title>
<link rel="icon" href="data:,">
<style>{% include "style" %}</style>
</head>
<body>
<main>
{% if runs|length > 1 %}
<h1>{{ title }}</h1>
<nav>{% for run in runs %}<a href="#{{ run.id }}">{{ run.name }}</a> {% endfor %}</nav>
{% endif %}
{% for run in runs %}
<section class="run" id="{{ run.id }}">
<h1>{{ run.name }}</h1>
<p class="faint">{{ run.task }} · {{ run.objective }} · {{ run.state }} · {{ run.seeds }} seed{{ "s" if run.seeds > 1 }}</p>
<p class="verdict">{{ run.verdict }}</p>
{% for words in run.remarks %}<p class="faint">{{ words }}</p>
{% endfor %}
{% for words in run.gaps %}<p class="ill">Left out: {{ words }}.</p>
{% endfor %}
<p class="{{ 'ill' if run.findings else 'faint' if run.early else 'well' }}">{{ run.health }}</p>
{% if run.tiles %}
<div class="tiles">
{% for tile in run.tiles %}
<div class="tile"><b>{{ tile.value }}</b><span>{{ tile.words }}</span>{% if tile.note %}<span>{{ tile.note }}</span>{% endif %}</div>
{% endfor %}
</div>
{% if run.seeds > 1 %}<p class="note">Medians over {{ run.seeds }} seeds, with 95 % bootstrap intervals of the median.</p>{% endif %}
{% endif %}

{% if run.findings %}
<h2>Health</h2>
{% for f in run.findings %}
<div class="finding {{ f.level }}"><h3>{{ f.title[0]|upper }}{{ f.title[1:] }}</h3><p>{{ f.saw[0]|upper }}{{ f.saw[1:] }}. {{ f.means }}</p><p><b>Try</b> {{ f.remedy }}.</p></div>
{% endfor %}
<p class="note">Did not fire: {{ run.checks|join(", ") }}.</p>
{% else %}
<p class="note">Looked for: {{ run.checks|join(", ") }}.</p>
{% endif %}

{% if run.law %}
<h2>The learned law</h2>
{% if run.behind %}<p class="note behind">{{ run.behind }}</p>{% endif %}
<div class="panels">
{% for panel in run.law %}{{ figure(panel) }}{% endfor %}
</div>
{% endif %}

{% if run.curves %}
<h2>How it got there</h2>
{% if run.seeds > 1 %}<p class="note" style="margin-bottom: .7rem">Lines are medians over the seeds; bands are 95 % bootstrap intervals of the median.</p>{% endif %}
<div class="panels">
{% for panel in run.curves %}{{ figure(panel) }}{% endfor %}
</div>
{% endif %}

{% if run.designs %}
<h2>Best designs</h2>
{% if run.behind %}<p class="note behind">{{ run.behind }}</p>{% endif %}
{% if run.logos %}
<div class="panels">
{% for panel in run.logos %}{{ figure(panel) }}{% endfor %}
</div>
<p class="note">A mode is a best design that differs from every better mode in at least {{ run.designs.apart }} letters; each design belongs to the nearest one. There are {{ run.designs.modes }} among the {{ run.designs.total }} designs. {{ run.designs.note }}</p>
{% elif run.designs.note %}
<p class="note">{{ run.designs.note }}</p>
{% endif %}
<div class="wide" style="margin-top: 1rem">
<table>
<thead><tr><th class="n">#</th><th>{{ "design" if run.designs.sequences else "state" }}</th><th class="n">{{ "expected score" if run.designs.orders else "score" }}</th>{% if run.designs.orders %}<th class="n">its 10 % quantile</th><th class="n">chance of exact synthesis</th>{% endif %}<th class="n">log-reward</th><th class="n">log-probability</th>{% if run.designs.origins %}<th>from</th>{% endif %}{% if run.designs.sequences %}<th class="n">distance to a better one</th><th class="n">mode</th>{% endif %}</tr></thead>
<tbody>
{% for d in run.designs.rows %}
<tr><td class="n">{{ d.rank }}</td><td><code>{{ d.what }}</code></td><td class="n">{{ d.score }}</td>{% if run.designs.orders %}<td class="n">{{ d.low }}</td><td class="n">{{ d.exact }}</td>{% endif %}<td class="n">{{ d.log_reward }}</td><td class="n">{{ d.log_pf }}</td>{% if run.designs.origins %}<td>{{ d.origin }}</td>{% endif %}{% if run.designs.sequences %}<td class="n">{{ "–" if d.distance is none else d.distance }}</td><td class="n">{{ d.family }}</td>{% endif %}</tr>
{% endfor %}
</tbody>
</table>
</div>
<p class="note">{% if run.designs.total > run.designs.rows|length %}The best {{ run.designs.rows|length }} of {{ run.designs.total }} in samples.csv. {% endif %}{% if run.designs.origins %}Those asked are the best different objects that the oracle was ever asked about, draws those of the final policy. {% endif %}{% if run.designs.orders %}The score of an order is what is expected of the string that is made of it; about one made string in ten scores below the quantile. {% if run.designs.makings %}Score and quantile are those of {{ run.designs.makings }} simulated makings of each, all orders with the same random numbers; the chance is exact.{% else %}All three are exact.{% endif %} {% endif %}The log-probability is that of the way this object was built.</p>
{% endif %}

<h2>Repeat it</h2>
<pre>{{ run.command }}</pre>
<p class="note">or, from its folder: <code>stochflow train --config {{ run.name }}/config.json --out NEW</code></p>
<details><summary>All settings</summary><dl>{% for key, value in run.settings %}<div><dt>{{ key }}</dt><dd>{{ value }}</dd></div>{% endfor %}</dl></details>
{% if run.environment %}<p class="note">{{ run.environment }}</p>{% endif %}
</section>
{% endfor %}
{% if live %}
<p class="note">This page looks again every {{ live }} seconds.</p>
<script>
const seen = {{ version|tojson }};
setInterval(async () => { try { const now = await (await fetch("/version", {cache: "no-store"})).text(); if (now !== seen) location.reload(); } catch {} }, {{ live }} * 1000);
</script>
<noscript><meta http-equiv="refresh" content="{{ live }}"></noscript>
{% endif %}
</main>
</body>
</html>
"""

COMPARE = """{% from "figure" import figure %}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>comparison · stochflow</title>
<link rel="icon" href="data:,">
<style>{% include "style" %}</style>
</head>
<body>
<main>
<h1>{{ arms|length }} runs compared</h1>
{% for words in warnings %}<p class="ill">{{ words }}</p>{% endfor %}
<h2>Verdict</h2>
{% for words in sentences %}<p class="verdict">{{ words }}</p>{% endfor %}
<p class="note">Paired by seed: each seed of a run is held against the same seed of {{ arms[0].label }}. Intervals are {{ level }} intervals of the mean difference: the wider of the bootstrap's and Student's. {{ caution }}</p>
{% if panels %}
<h2>At a glance</h2>
<div class="panels">
{% for panel in panels %}{{ figure(panel) }}{% endfor %}
</div>
{% endif %}
<h2>Every figure</h2>
<div class="wide">
<table>
<thead><tr><th>median over the seeds</th>{% for arm in arms %}<th>{{ arm.label }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}
<tr><td>{{ row.words }}<br><span class="note">{{ row.better }} is better</span></td><td>{{ row.first }}</td>{% for cell in row.others %}<td class="verdicts">{% if cell.kind %}<b class="{{ cell.kind }}">{{ cell.value }}</b>{% else %}{{ cell.value }}{% endif %}<br><span class="note">{{ cell.verdict }}</span></td>{% endfor %}</tr>
{% endfor %}
<tr><td>runs</td>{% for arm in arms %}<td class="note">{% for run in arm.runs %}{{ run.name }} ({{ run.seeds|length }} seed{{ "s" if run.seeds|length > 1 }}){{ "" if loop.last else ", " }}{% endfor %}</td>{% endfor %}</tr>
</tbody>
</table>
</div>
</main>
</body>
</html>
"""

SWEEP = """{% from "figure" import figure %}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }} · stochflow sweep</title>
<link rel="icon" href="data:,">
<style>{% include "style" %}</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
<p class="faint">{{ task }} · {{ rows|length }} cells · {{ seeds }} seed{{ "s" if seeds > 1 }} each · by {{ words }}, {{ better }} is better</p>
{% if waiting %}<p class="ill">{{ waiting }} cells have not been run yet: this is the report of the others.</p>{% endif %}
{% for cell in failed %}<div class="finding serious"><h3>{{ cell.settings }}</h3><p>{{ cell.why }}</p></div>{% endfor %}
{% if panels %}
<div class="panels">
{% for panel in panels %}{{ figure(panel) }}{% endfor %}
</div>
{% endif %}
<h2>Best first</h2>
<div class="wide">
<table>
<thead><tr><th class="n">#</th>{% for n in names %}<th class="n">{{ n }}</th>{% endfor %}<th class="n">{{ words }}</th><th>against the best</th><th class="n">steps</th><th class="n">seconds</th><th>run folder</th></tr></thead>
<tbody>
{% for row in rows %}
<tr><td class="n">{{ loop.index }}</td>{% for v in row.settings %}<td class="n">{{ v }}</td>{% endfor %}<td class="n">{% if loop.first %}<b class="well">{{ row.value }}</b>{% elif row.kind %}<b class="ill">{{ row.value }}</b>{% else %}{{ row.value }}{% endif %}</td><td class="verdicts">{{ row.verdict }}</td><td class="n">{{ row.steps }}</td><td class="n">{{ row.seconds }}</td><td><code>{{ row.folder }}</code></td></tr>
{% endfor %}
</tbody>
</table>
</div>
<p class="note">Medians over the seeds. Each cell is held against the best one, seed by seed; intervals are 95 % intervals of the mean difference, widened so that all of them hold at once. The best of many cells looks better than it is: train it again with other seeds before its figure is quoted.{% if ranged %} Cells were proposed by Optuna from the results of those before.{% endif %}</p>
</main>
</body>
</html>
"""

TROUBLE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><meta http-equiv="refresh" content="{{ live }}">
<title>waiting · stochflow</title><link rel="icon" href="data:,"><style>{% include "style" %}</style></head>
<body><main><h1>The run cannot be read just now</h1><p>{{ message }}</p><p class="note">This page looks again every {{ live }} seconds.</p></main></body>
</html>
"""
