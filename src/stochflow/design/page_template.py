"""The markup of a campaign's page (jinja2); its colours and table styles are those of the runs' reports."""

from __future__ import annotations

STYLE = """
.seq { font-family: ui-monospace, "SFMono-Regular", Menlo, Consolas, monospace; font-size: .9em; white-space: normal; }
.seq span { white-space: nowrap; display: inline-block; margin-right: .5ch; } .seq b { color: var(--c2); text-decoration: underline; text-underline-offset: 2px; }
td.seq { min-width: min(11ch, 40vw); } .long td.seq { min-width: min(34ch, 48vw); }
.bar { position: relative; display: inline-block; width: 6rem; height: .5rem; background: var(--rule); border-radius: 3px; vertical-align: middle; }
.bar i { position: absolute; top: 0; bottom: 0; background: var(--c1); opacity: .45; border-radius: 3px; } .bar u { position: absolute; top: -.15rem; bottom: -.15rem; width: 2px; background: var(--ink); }
.full { grid-column: 1 / -1; } details.page { margin-top: 2rem; } td .note { display: block; } .plate { table-layout: fixed; }
.seq .phone { display: none; }
@media (max-width: 700px) { th.few, td.few { display: none; } .seq .phone { display: block; } td, th { padding: .3rem .45rem; } }
@media print { th.few, td.few { display: table-cell; } .seq .phone { display: none; } details.page { display: block; } details.page > summary { display: none; } details.page::details-content { content-visibility: visible; block-size: auto; } }
"""

PAGE = """{% from "figure" import figure %}{% from "rows" import rows with context %}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ page.name }} · stochflow design</title>
<link rel="icon" href="data:,">
<style>{% include "style" %}{% include "own" %}</style>
</head>
<body>
<main>
<h1>{{ page.name }}</h1>
<p class="faint">{{ page.about }}</p>
<p class="verdict">{{ page.verdict }}</p>
<div class="tiles">
{% for tile in page.tiles %}<div class="tile"><b>{{ tile[0] }}</b><span>{{ tile[1] }}</span></div>
{% endfor %}
</div>

{% if page.designs %}
<h2>Designs to order: round {{ page.round }}</h2>
<p class="note">{{ page.marks }} {{ page.rules }}</p>
{% for words in page.notes %}<p class="note">{{ words }}</p>{% endfor %}
{{ rows(page.designs) }}
{% if page.more %}<details class="page"><summary>{{ page.more|length }} more designs</summary>{{ rows(page.more) }}</details>{% endif %}
{% else %}
<p class="note">No batch has been proposed yet: stochflow design propose {{ page.folder }} --batch 96</p>
{% endif %}

{% if page.batch %}
<h2>The batch</h2>
<p class="note">{{ page.batch_words }}</p>
<div class="panels">
{% for panel in page.batch %}{% if panel.key == "logo" and page.long %}<div class="full">{{ figure(panel) }}</div>{% else %}{{ figure(panel) }}{% endif %}{% endfor %}
</div>
{% endif %}

{% if page.models %}
<h2>What the model knows</h2>
{% for words in page.knows %}<p>{{ words }}</p>{% endfor %}
<div class="panels">{% for panel in page.knowledge %}{{ figure(panel) }}{% endfor %}</div>
<h3 style="margin-top: 1rem">On held-out groups</h3>
<div class="wide" style="margin-top: .4rem"><table>
<thead><tr><th>column</th><th>model</th><th class="n">error (RMSE)</th><th class="n">rank correlation</th><th class="n few">explained</th></tr></thead>
<tbody>{% for m in page.models %}<tr><td>{{ m.column }}</td><td>{{ m.name }}{% if m.chosen %} <span class="well">chosen</span>{% endif %}</td><td class="n">{{ m.rmse }}</td><td class="n">{{ m.rank }}</td><td class="n few">{{ m.r2 }}</td></tr>{% endfor %}</tbody>
</table></div>
{% if page.coverage %}
<h3 style="margin-top: 1rem">Do intervals hold what they say?</h3>
<div class="wide" style="margin-top: .4rem"><table>
<thead><tr><th>column</th><th>values</th><th class="n">interval</th><th class="n">held</th></tr></thead>
<tbody>{% for c in page.coverage %}<tr><td>{{ c.column }}</td><td>{{ c.what }}</td><td class="n">{{ c.level }}</td><td class="n">{{ c.held }}</td></tr>{% endfor %}</tbody>
</table></div>
<p class="note">Intervals are made from held-out groups and promised for sequences like those, not for designs chosen for their high predictions; the rows of the rounds say how it went.</p>
{% endif %}
{% if page.reach %}
<h3 style="margin-top: 1rem">Error by distance to the nearest known sequence</h3>
<div class="wide" style="margin-top: .4rem"><table>
<thead><tr><th>column</th><th class="n">letters away</th><th class="n">sequences</th><th class="n">error (RMSE)</th></tr></thead>
<tbody>{% for r in page.reach %}<tr><td>{{ r.column }}</td><td class="n">{{ r.away }}</td><td class="n">{{ r.rows }}</td><td class="n">{{ r.rmse }}</td></tr>{% endfor %}</tbody>
</table></div>
{% endif %}
{% endif %}

{% if page.progress %}
<h2>Progress</h2>
{% for words in page.front_words %}<p>{{ words }}</p>{% endfor %}
<div class="panels">{% for panel in page.progress %}{{ figure(panel) }}{% endfor %}</div>
{% endif %}

<details class="page"><summary>How the batch was drawn, and all settings</summary>
{% for words in page.law %}<p class="note">{{ words }}</p>{% endfor %}
<dl>{% for key, value in page.settings %}<div><dt>{{ key }}</dt><dd>{{ value }}</dd></div>{% endfor %}</dl>
</details>
<p class="note">Go on: <code>stochflow design record {{ page.folder }} measured.csv</code>, then <code>stochflow design propose {{ page.folder }} --batch 96</code></p>
</main>
</body>
</html>
"""

ROWS = """{% macro rows(designs) %}
<div class="wide{{ ' long' if page.long }}"><table>
<thead><tr><th>well</th><th>design</th>{% for c in page.columns %}<th class="n">{{ c }}</th>{% endfor %}{% if page.shows.exact %}<th class="n">exact</th>{% endif %}{% if page.shows.gc %}<th class="n few">GC</th>{% endif %}<th class="n few">distance</th>{% if page.shows.measured %}<th class="n">measured</th>{% endif %}</tr></thead>
<tbody>
{% for d in designs %}
<tr><td>{{ d.well }}</td><td class="seq">{{ d.sequence|safe }}<span class="note">{{ d.id }}{% if d.role %} · {{ d.role }}{% endif %}{% if d.far %} · beyond the tested distance{% endif %}{% if d.distance %}<span class="phone">{% if d.gc %}GC {{ d.gc }}, {% endif %}distance {{ d.distance }}</span>{% endif %}</span></td>
{% for v in d.values %}<td class="n">{{ v.mean }}{% if v.low %}<span class="note">{{ v.low }} to {{ v.high }}</span>{% endif %}</td>{% endfor %}
{% if page.shows.exact %}<td class="n">{{ d.exact }}{% if d.low %}<span class="note">{{ d.low }}</span>{% endif %}</td>{% endif %}{% if page.shows.gc %}<td class="n few">{{ d.gc }}</td>{% endif %}<td class="n few">{{ d.distance }}</td>{% if page.shows.measured %}<td class="n">{{ d.measured }}</td>{% endif %}</tr>
{% endfor %}
</tbody></table></div>
{% endmacro %}
"""
