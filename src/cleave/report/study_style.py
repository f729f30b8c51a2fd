"""The style sheet of a study's page: light and dark, wide and narrow."""

from __future__ import annotations

from cleave.report.chart_palette import DARK, GREY, LIGHT


def _variables(lines: tuple[str, ...], greys: tuple[str, ...]) -> str:
    numbered = [
        *((f"line-{i}", color) for i, color in enumerate(lines)),
        *((f"grey-{i}", c) for i, c in enumerate(greys)),
    ]
    return "".join(f"--{name}:{color};" for name, color in numbered)


STYLE = (
    ":root{color-scheme:light dark;--page:#fff;--ink:#1d1f23;--soft:#5c6370;--grid:#e3e5e8;--card:#f7f8f9;"
    "--good:#1a7f37;--bad:#b42318;--link:#1f5fa8;"
    + _variables(LIGHT, GREY["light"])
    + "}@media(prefers-color-scheme:dark){:root{--page:#15171b;--ink:#e6e7ea;--soft:#9aa1ad;--grid:#30343b;"
    "--card:#1c1f25;--good:#57c06d;--bad:#ff8a7a;--link:#7db4ff;" + _variables(DARK, GREY["dark"]) + "}}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1240px;margin:auto;padding:1.2rem}
h1{font-size:1.7rem;margin:.4rem 0}h2{margin:2.4rem 0 .4rem;font-size:1.3rem}h4{margin:.9rem 0 .2rem}
p{margin:.4rem 0;max-width:52rem}a{color:var(--link)}
.made{color:var(--soft);font-size:.88rem}code{overflow-wrap:anywhere}
nav{display:flex;flex-wrap:wrap;gap:.3rem 1rem;margin-top:.8rem;font-size:.92rem}
.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,500px),1fr));gap:1rem}
figure{margin:0;padding:.7rem;background:var(--card);border-radius:10px;min-width:0}
figure svg{display:block;width:100%;height:auto;max-width:560px;margin:auto}
svg text{font-family:system-ui,sans-serif!important}
figcaption{color:var(--soft);font-size:.84rem;margin:.3rem 0}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.82rem;font-variant-numeric:tabular-nums}
th,td{padding:.2rem .4rem;border-bottom:1px solid var(--grid);text-align:right;white-space:nowrap}
th:first-child{text-align:left;position:sticky;left:0;background:var(--card)}
section>.wide th:first-child{background:var(--page);position:static}
.ours th,.ours td{font-weight:650}.cloud{color:var(--soft)}.none{color:var(--bad);font-weight:400}
.claims td,.claims th{text-align:left;white-space:normal;vertical-align:top}.claims td:nth-child(3){white-space:nowrap}
.yes{color:var(--good);font-weight:650}.no{color:var(--bad);font-weight:650}.partly{font-weight:650}
.words{text-align:left;white-space:normal}
details{margin:.4rem 0}summary{cursor:pointer;font-size:.9rem;color:var(--soft)}
ul{margin:.3rem 0;padding-left:1.2rem;font-size:.86rem}.why{color:var(--soft);font-size:.8rem}
@media(max-width:560px){main{padding:.7rem}figure{padding:.4rem;margin:0 -.3rem}h1{font-size:1.35rem}}
"""
)
