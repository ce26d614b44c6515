"""The page's style sheet: light and dark, for phones and wide screens, with colours for colour-blind readers."""

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1c1e21;--soft:#5f6670;--rule:#e3e6ea;--panel:#f7f8fa;
--c0:#0b6bb8;--c1:#d1570c;--c2:#0b8a63;--c3:#b4508f;--c4:#b98600;--c5:#3aa0d9;--c6:#7a5fc0;--c7:#7d8a2e;
--skip:#c62828;--restart:#7a8391}
@media (prefers-color-scheme:dark){:root{--paper:#14161a;--ink:#e6e8eb;--soft:#9aa3ae;--rule:#2b3037;--panel:#1b1e23;
--c0:#5aaef0;--c1:#f28d4f;--c2:#4cc79b;--c3:#dd86bd;--c4:#e2b23c;--c5:#8fd0f5;--c6:#b19cf0;--c7:#b9c560;
--skip:#ff7a70;--restart:#8b94a1}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;
-webkit-text-size-adjust:100%;overflow-wrap:anywhere}
main{max-width:1080px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:1.7rem;margin:0 0 12px}
h2{font-size:1.15rem;margin:36px 0 8px;padding-top:12px;border-top:1px solid var(--rule)}
p{margin:0 0 12px;color:var(--soft);max-width:70ch}
.what{color:var(--ink)}.answer{color:var(--ink);font-size:1.1rem;font-weight:600}
nav{display:flex;flex-wrap:wrap;gap:2px 16px;margin-top:16px;font-size:.85rem}a{color:var(--c0)}
.facts{display:flex;flex-wrap:wrap;gap:8px 28px;margin:0}
.facts dt{color:var(--soft);font-size:.8rem}
.facts dd{margin:0;font-size:1.15rem;font-variant-numeric:tabular-nums}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,420px),1fr));gap:20px 28px}
figure{margin:0;min-width:0}
figcaption{font-weight:600;font-size:.9rem;margin-bottom:4px}
.chart{display:block;width:100%;height:auto}
.chart text{fill:var(--soft);font-size:12px;font-variant-numeric:tabular-nums}
.grid{stroke:var(--rule)}.axis{stroke:var(--soft)}
.line{fill:none;stroke:var(--c);stroke-width:1.6;stroke-linejoin:round}
.dashed{stroke-dasharray:5 4}.thin{stroke-width:.8;opacity:.75}
.band{fill:var(--c);opacity:.18}.area{fill:var(--c);opacity:.85}.bar,.dot{fill:var(--c)}
.equal{stroke:var(--paper);stroke-width:1.5;opacity:.9}
.mark{stroke-width:1.2;stroke:var(--restart);stroke-dasharray:3 3}.mark.skipped{stroke:var(--skip)}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;margin:4px 0 0;font-size:.8rem}
.swatch{display:inline-block;width:14px;height:3px;border-radius:2px;background:var(--c);
vertical-align:middle;margin-right:5px}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}
.c4{--c:var(--c4)}.c5{--c:var(--c5)}.c6{--c:var(--c6)}.c7{--c:var(--c7)}
pre{background:var(--panel);border:1px solid var(--rule);border-radius:6px;padding:12px;white-space:pre-wrap;
font:13px/1.45 ui-monospace,"SF Mono",Menlo,Consolas,monospace;margin:0 0 12px}
details{margin-top:16px}summary{cursor:pointer;font-weight:600}
details pre{margin-top:8px}details details{margin-left:16px}details details summary{font-weight:400;font-size:.9rem}
.wide{overflow-x:auto;margin:12px 0;font-size:.82rem;font-variant-numeric:tabular-nums}
.wide table{border-collapse:collapse}
.wide th,.wide td{padding:3px 10px;text-align:right;border-bottom:1px solid var(--rule);overflow-wrap:normal}
.wide td{max-width:28em;overflow-wrap:break-word}.wide td.whole{white-space:nowrap}
.wide th:first-child{text-align:left;position:sticky;left:0;background:var(--paper)}.wide thead th{color:var(--soft)}
@media(max-width:600px){.wide th,.wide td{padding:3px 5px}.wide td{max-width:9em;overflow-wrap:break-word}
.wide th:first-child{overflow-wrap:anywhere;min-width:8em;max-width:42vw}}
ul{padding-left:20px}li{font-size:.9rem}
footer{margin-top:40px;color:var(--soft);font-size:.8rem}
"""
