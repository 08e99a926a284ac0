"""What slows a node down is read from its kernel, and is a cause only where others lack it."""

from __future__ import annotations

import pytest

from tests.support.manual_clock import ManualClock
from zero_agent.node.strain import Strain
from zero_orchestrator.observe.detectors.strain import CAUSES, cause


@pytest.fixture
def kernel(tmp_path):
    """Writes files below a root, as a kernel shows them."""

    def show(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    show(
        {
            "proc/self/cgroup": "0::/system.slice/zero.service\n",
            "sys/fs/cgroup/system.slice/zero.service/cpu.stat": "nr_periods 10\nnr_throttled 1\n",
            "proc/vmstat": "pswpin 5\npswpout 5\npgfault 7\n",
            "proc/stat": "cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 1 2 3\n",
            "proc/pressure/cpu": "some avg10=0.00 avg60=0.00 avg300=0.00 total=1000\n",
            "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "3\n",
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "1200000\n",
            "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "3000000\n",
            "sys/class/thermal/thermal_zone0/temp": "45000\n",
            "sys/class/thermal/thermal_zone1/temp": "95500\n",
        }
    )
    return show


def test_the_strain_of_a_node_is_what_its_kernel_has_counted_since_the_last_look(kernel, tmp_path):
    clock = ManualClock()
    strain = Strain(clock, root=tmp_path)
    clock.advance(10)
    kernel(
        {
            "sys/fs/cgroup/system.slice/zero.service/cpu.stat": "nr_periods 110\nnr_throttled 64\n",
            "proc/vmstat": "pswpin 10005\npswpout 5\n",
            "proc/stat": "cpu  150 0 150 850 0 0 0 50 0 0\n",
            "proc/pressure/cpu": "some avg10=9.00 avg60=0.00 avg300=0.00 total=5001000\n",
            "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "5\n",
        }
    )
    found = strain.look()
    assert found == {
        "throttled": 0.63,
        "swap_bytes_per_s": 4096000.0,
        "hot_events": 2,
        "clock": 0.4,
        "temperature_c": 95.5,
        "steal": 0.25,
        "cpu_pressure": 0.5,
    }
    assert found.keys() == {each.name for each in CAUSES}
    clock.advance(10)
    assert "throttled" not in strain.look()  # no scheduling period has passed


def test_a_kernel_that_shows_nothing_is_no_error(tmp_path):
    clock = ManualClock()
    strain = Strain(clock, root=tmp_path)
    clock.advance(1)
    assert strain.look() == {}


def test_the_cause_is_what_the_slow_node_has_and_another_lacks():
    slow = {"throttled": 0.63, "cpu_pressure": 0.9, "clock": 0.95}
    assert cause(slow, [{"cpu_pressure": 0.9}, {}]) == (
        "its CPU quota stops it in 63% of the scheduling periods (cpu.stat of its cgroup); "
        "its processes wait for a free CPU 90% of the time"
    )
    assert "wait for a free CPU" not in cause(slow, [{"cpu_pressure": 0.9}])
    assert cause(slow, []) == ""  # all ranks are on this node
