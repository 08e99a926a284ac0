"""The page of a job in a browser: what it draws, for whom, and how fast."""

import json
from dataclasses import replace

import pytest

from tests.support.browser import CHROMIUM, WIDTHS, browser
from tests.support.pictured import disturbed
from zero_orchestrator.ctl.page import document
from zero_orchestrator.ctl.picture import picture

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on the PATH")

CONTRAST = """
(() => {
  const power = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const shade = (c) => power(c / 255);
  const light = ([r, g, b]) => 0.2126 * shade(r) + 0.7152 * shade(g) + 0.0722 * shade(b);
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = parse(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
  };
  const low = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !node.checkVisibility() || node.matches("script, style, noscript")) continue;
    const style = getComputedStyle(node), svg = node instanceof SVGElement;
    const [a, b] = [light(parse(svg ? style.fill : style.color)), light(behind(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push([node.textContent.trim().slice(0, 30), ratio]);
  }
  return low;
})()
"""
"""Every text whose contrast with its background is less than 4.5 (WCAG AA)."""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def report(tmp_path, page):
    """Opens the report of a job."""

    def open_report(records) -> None:
        path = tmp_path / "report.html"
        now_s = records.status.members[0].step_time_s
        path.write_text(document.page(picture(records, now_s=now_s), live=False))
        page.errors.clear()
        page.open(path.as_uri())

    return open_report


@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_fits_its_window_and_can_be_read(page, report, size, dark):
    page.look(*WIDTHS[size], dark=dark)
    report(disturbed())
    width, _ = WIDTHS[size]
    assert page.run("document.documentElement.scrollWidth") == width
    assert page.run(CONTRAST) == []
    assert page.errors == []


def test_everything_can_be_reached_and_read_with_a_keyboard(page, report):
    page.look(*WIDTHS["desktop"])
    report(disturbed())
    reached = []
    for _ in range(40):
        page.press("Tab")
        reached.append(page.run("document.activeElement.id || document.activeElement.textContent"))
    named = {"charts", "lanes", "nodes", "checkpoints", "paces", "find", "matters"}
    assert named <= set(reached)
    assert "Loss and throughput as a table" in reached
    page.run("document.getElementById('charts').focus()")
    page.press("Home")
    page.press("ArrowRight")
    told = page.run("document.getElementById('charts').getAttribute('aria-valuetext')")
    assert ", step 2, loss 4.405, " in told
    assert told.endswith("world size 4")
    page.press("End")
    shown = page.run("document.getElementById('readout').textContent")
    assert "step 76 · loss 3.92" in shown


def test_what_the_charts_show_is_there_in_words_and_tables(page, report):
    page.look(*WIDTHS["desktop"])
    report(disturbed())
    words = page.run("document.getElementById('words').textContent")
    assert "Loss: 4.399 at step 1, 3.92 at step 76" in words
    assert "failures: 1, longest 1." in words
    rows = "document.querySelectorAll('#{} tbody tr').length"
    page.run("document.getElementById('curve-table').open = true")
    page.run("document.getElementById('lane-table').open = true")
    page.run("new Promise(done => setTimeout(done))")
    assert page.run(rows.format("curve-table")) == 39
    assert "gone" in page.run("document.getElementById('lane-table').textContent")
    assert page.run(rows.format("checkpoints")) == 7 + 1  # and one in memory
    newest = "document.querySelector('#checkpoints tbody tr').textContent"
    assert page.run(newest).startswith("70memory")
    assert page.run(rows.format("paces")) == 2 + 4
    assert page.run("document.getElementById('legend').textContent.includes('checkpoint')")
    slowest = "document.querySelectorAll('#paces tbody tr')[2].textContent"
    assert page.run(slowest) == "rank 2 on node-c250.35 s0.42 s0.525 s"
    assert page.run("document.querySelectorAll('.recovery').length") == 2


def test_a_job_without_a_checkpoint_on_disk_has_none_in_its_charts(page, report):
    page.look(*WIDTHS["desktop"])
    records = disturbed()
    report(replace(records, history=replace(records.history, checkpoints=())))
    assert page.run("document.querySelectorAll('#checkpoints tbody tr').length") == 1
    assert page.run("document.querySelector('.mark').getAttribute('d')") == "M0 0"
    assert not page.run("document.getElementById('legend').textContent.includes('checkpoint')")


def test_the_axis_of_steps_keeps_the_lanes_under_the_curve(page, report):
    page.look(*WIDTHS["desktop"])
    report(disturbed())
    ends = "[...document.querySelectorAll('.curve')].map(c => Math.round(c.getBBox().x))"
    before = page.run(ends)
    page.run("document.querySelector('input[value=step]').click()")
    after = page.run(ends)
    assert after[0] < before[0]  # the start, in which no step was done, takes no room
    assert page.errors == []


def test_10_000_steps_and_200_nodes_are_drawn_with_few_elements(page, report):
    page.look(*WIDTHS["desktop"])
    report(disturbed(nodes=200, steps=10_000, step_s=1.3, every=250, fails_at=4000))
    assert page.errors == []
    assert page.run("document.querySelectorAll('*').length") < 6000


def test_what_a_job_says_is_never_markup(page, report):
    records = disturbed()
    evil = '<img src=x onerror="document.title=1">'
    for event in records.events:
        event.record.update(text=evil, node=evil)
    page.look(*WIDTHS["desktop"])
    report(records)
    assert page.run("document.querySelectorAll('img').length") == 0
    assert evil in page.run("document.getElementById('events').textContent")
    assert json.loads(page.run("JSON.stringify(document.title)")) == "demo: ACTIVE"
