"""The page of a job in a browser: what it draws, for whom, and how fast."""

import json
from dataclasses import replace
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from tests.support.browser import CHROMIUM, WIDTHS, browser
from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.pictured import disturbed
from tests.support.staged import JOBS, Staged, staged
from zero_orchestrator.ctl.page import document
from zero_orchestrator.ctl.page.picture import picture, read

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


REDRAWN = """
new Promise((done) => {
  const wait = (frames) => (frames ? requestAnimationFrame(() => wait(frames - 1)) : done());
  wait(3);
})
"""
"""A change of size is seen in one frame, and drawn in the next one."""
CUT = """
(() => {
  const found = [];
  const inside = (part, of, what) => {
    if (part.width && (part.left < of.left - 1 || part.right > of.right + 1)) found.push(what);
  };
  const box = (node) => node.getBoundingClientRect();
  for (const text of document.querySelectorAll("main svg text"))
    inside(box(text), box(text.ownerSVGElement), text.textContent);
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].filter((n) => n.nodeType === 3 && n.textContent.trim());
    const panel = node.closest(".panel, .tile, header, footer");
    if (!own.length || !panel || !node.checkVisibility() || node instanceof SVGElement) continue;
    if (node.closest(".rows thead")) continue;
    const words = document.createRange();
    words.selectNodeContents(node);
    inside(box(words), box(panel), node.textContent);
    const cell = node.closest("td, th, dd, dt, summary");
    if (cell) inside(box(words), box(cell), node.textContent);
  }
  if (document.documentElement.scrollWidth > innerWidth) found.push("the page");
  for (const place of document.querySelectorAll(".tall, .fits, main section, td, dd"))
    if (place.scrollWidth > place.clientWidth + 1) found.push(place.id || place.textContent);
  return found;
})()
"""
"""Every text that ends beyond its cell, its panel or the window: nothing is ever cut."""


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


@pytest.fixture
def shown(tmp_path, page):
    """Opens the report of a staged job."""

    def open_report(name: str) -> Staged:
        job, store = staged(name), MemoryStore(ManualClock())
        job.write(store)
        path = tmp_path / f"{name}.html"
        found = picture(read(store, name), now_s=job.now_s)
        path.write_text(document.page(found, live=False))
        page.errors.clear()
        page.open(path.as_uri())
        return job

    return open_report


@pytest.mark.corners(name=("failed", "full-disk"))
@pytest.mark.parametrize("name", JOBS)
def test_no_text_is_cut_at_any_width_and_all_can_be_read(page, shown, name):
    """With a failed job, a full disk, 62 nodes: what an operator looks at."""
    page.look(1600, 1000)
    shown(name)
    for made in "curve-table", "timeline-table":
        page.run(f"document.getElementById('{made}').open = true")
    page.run("document.querySelectorAll('.recovery').forEach((one) => (one.open = true))")
    for width in (1600, 1280, 1000, 760, 390, 320):
        page.look(width, 900, dark=width in (1600, 390))
        page.run(REDRAWN)
        assert page.run(CUT) == [], width
    assert page.run(CONTRAST) == []
    page.look(1280, 900)
    assert page.run(CONTRAST) == []
    assert page.errors == []


def test_30_failures_without_a_step_are_one_band_and_one_recovery(page, shown):
    page.look(1600, 1000)
    shown("failed")
    bands = "[...document.querySelectorAll('#charts .band')].map((b) => b.getBBox())"
    boxes = page.run(f"{bands}.map((b) => [b.x, b.x + b.width])")
    assert len(boxes) == 2
    assert boxes[0][1] < boxes[1][0], "they do not overlap"
    assert page.run("document.querySelectorAll('.recovery').length") == 2
    newest = page.run("document.querySelector('.recovery').textContent")
    assert newest.startswith("29 failures in a row, the last: workers lost their peers")
    assert "no step since" in newest
    assert page.run("picture.recoveries.map((one) => one.failures).join()") == "1,29"


def test_what_is_wrong_now_is_at_the_head_of_the_page_and_on_the_time_line(page, shown):
    page.look(1600, 1000)
    shown("full-disk")
    text = page.run("document.getElementById('wrong').textContent")
    assert "the last 3 failed: no space left on device; waiting for room, 57 min left" in text
    strips = "[...document.querySelectorAll('#charts text')].map((one) => one.textContent)"
    assert {"saves fail", "etcd away"} <= set(page.run(strips))
    assert page.run("document.querySelectorAll('#charts .trouble').length") == 2
    assert page.run("picture.timelines[0].spans.at(-2)[2]") == "saving", "training waits for it"
    shown("healthy")
    assert page.run("document.getElementById('wrong').checkVisibility()") is False
    assert page.run("document.querySelectorAll('#charts .trouble').length") == 0


RED = """
(() => {
  const DRAWN = ["fill", "stroke"], WRITTEN = ["color", "backgroundColor"];
  const wrong = ["--warn", "--bad", "--recovering", "--stuck", "--repeating", "--waiting"];
  const style = getComputedStyle(document.documentElement);
  const probe = document.body.appendChild(document.createElement("i"));
  const shade = (name) => {
    probe.style.color = style.getPropertyValue(name);
    return getComputedStyle(probe).color;
  };
  const shades = new Set(wrong.map(shade));
  probe.remove();
  const of = (node, names) => names.some((name) => {
    const found = getComputedStyle(node)[name];
    return shades.has(found) || found.includes("url(");
  });
  return [...document.querySelectorAll("body *")].filter((node) => node.checkVisibility())
    .filter((node) => !node.closest(".patterns, .danger"))
    .filter((node) => of(node, node instanceof SVGElement ? DRAWN : WRITTEN))
    .map((node) => node.textContent || node.getAttribute("class"));
})()
"""
"""Whatever has a colour that stands for something wrong."""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_job_with_which_nothing_is_wrong_has_no_warning_colour(page, shown, dark):
    page.look(1600, 1000, dark=dark)
    shown("healthy")
    assert page.run(RED) == []
    shown("stuck")
    assert "dead link" in page.run(RED)


def test_times_have_their_date_and_zone_and_the_head_says_since_when_the_job_runs(page, shown):
    page.look(1600, 1000)
    page.ask("Emulation.setTimezoneOverride", timezoneId="Asia/Kolkata")
    try:
        job = shown("ended")
        begun = datetime.fromtimestamp(job.began_s, ZoneInfo("Asia/Kolkata"))
        since = page.run("document.getElementById('since').textContent")
        assert since.startswith(f"Started {begun:%Y-%m-%d %H:%M:%S} UTC+05:30, ended ")
        assert since.endswith(" after 50 min, by ada@login-1")
        head = "document.querySelector('#{} th{}').textContent"
        assert page.run(head.format("events", "")) == "time, UTC+05:30"
        first = page.run("document.querySelector('#events tbody tr:last-child').textContent")
        assert first.startswith(f"{begun:%Y-%m-%d %H:%M:%S}")
    finally:
        page.ask("Emulation.setTimezoneOverride", timezoneId="")


@pytest.mark.full
def test_62_nodes_are_drawn_with_their_hosts_spares_and_their_straggler(page, shown):
    page.look(1600, 1000)
    shown("large")
    assert page.run("document.querySelectorAll('#nodes tbody tr').length") == 62
    tile = "[...document.querySelectorAll('.tile')].find((t) => t.textContent.startsWith('Nodes'))"
    expected = "Nodes60and 2 spares; 2 to 60 wanted, 480 workers"
    assert page.run(f"{tile}.textContent") == expected
    last = page.run("document.querySelector('#nodes tbody tr:last-child').textContent")
    assert last == "gpu-61spare---10.20.7.15:29400rack8-gpu-61.cluster.example-"
    first = page.run("document.querySelector('#nodes tbody tr').textContent")
    assert first.endswith("rack1-gpu-00.cluster.example8 x NVIDIA H100 80GB HBM3")
    assert page.run("document.querySelectorAll('#timelines path.straggler').length") == 1
    held = page.run("document.querySelector('#problems tbody tr').textContent")
    assert held.startswith("straggler")
    assert "holds now" in held


def test_everything_can_be_reached_and_read_with_a_keyboard(page, report):
    page.look(*WIDTHS["desktop"])
    report(disturbed())
    reached = []
    for _ in range(40):
        page.press("Tab")
        reached.append(page.run("document.activeElement.id || document.activeElement.textContent"))
    named = {"charts", "timelines", "nodes", "checkpoints", "paces", "find", "matters"}
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
    assert "failures: 1, longest time without a step 1.8 s" in words
    rows = "document.querySelectorAll('#{} tbody tr').length"
    page.run("document.getElementById('curve-table').open = true")
    page.run("document.getElementById('timeline-table').open = true")
    page.run("new Promise(done => setTimeout(done))")
    assert page.run(rows.format("curve-table")) == 39
    assert "gone" in page.run("document.getElementById('timeline-table').textContent")
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


def test_the_axis_of_steps_keeps_the_timelines_under_the_curve(page, report):
    page.look(*WIDTHS["desktop"])
    report(disturbed())
    ends = "[...document.querySelectorAll('.curve')].map(c => Math.round(c.getBBox().x))"
    before = page.run(ends)
    page.run("document.querySelector('input[value=step]').click()")
    after = page.run(ends)
    assert after[0] < before[0]  # the start, in which no step was done, takes no room
    assert page.errors == []


@pytest.mark.full
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
