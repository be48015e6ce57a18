"""From reports to figures, and from runs to medians."""

from __future__ import annotations

import pytest

from recado.bench.figures import WARM_UP, Run, figures, of_fifths, of_rates, of_waits, percentile, summarised
from recado.bench.messages import Report


def report(*timeline: tuple[float, int], cpu: float = 0.0, memory: float = 50.0) -> Report:
    return Report(timeline=list(timeline), memory_mb=[(0.0, memory)], cpu_seconds=cpu)


def run(rate: float, waits: tuple[float, ...] = (), fifths: tuple[float, ...] = (5.0, 4.0, 3.0, 2.0, 1.0)) -> Run:
    return Run(rate=rate, fifths=list(fifths), cpu_us=rate / 10, memory_mb=[1.0, rate], waits_ms=list(waits))


def test_the_rate_counts_from_the_start_signal_to_the_last_job_of_the_slowest_process() -> None:
    found = figures(100.0, [report((101.0, 30), (102.0, 30)), report((104.0, 20))], [])
    assert found.rate == pytest.approx(80 / 4)


def test_fifths_have_each_its_own_rate() -> None:
    found = figures(0.0, [report((1.0, 20), (2.0, 20), (3.0, 20), (4.0, 20), (8.0, 20))], [])
    assert found.fifths == pytest.approx([20, 20, 20, 20, 5])


def test_a_batch_that_spans_fifths_counts_for_each_by_its_share() -> None:
    found = figures(0.0, [report((10.0, 100))], [])
    assert found.fifths == pytest.approx([10] * 5)


def test_cpu_time_is_that_of_all_processes_by_the_job() -> None:
    found = figures(0.0, [report((1.0, 50), cpu=0.002), report((1.0, 50), cpu=0.003)], [])
    assert found.cpu_us == pytest.approx(50)


def test_memory_is_that_of_the_largest_process_after_each_tenth_of_the_jobs() -> None:
    grows = Report(timeline=[(float(i), 10) for i in range(1, 11)], memory_mb=[(i + 0.5, 50.0 + i) for i in range(11)])
    small = Report(timeline=[], memory_mb=[(0.0, 10.0)])
    assert figures(0.0, [grows, small], []).memory_mb == [50.0 + i for i in range(10)]


def test_the_batch_is_what_a_claim_brought_on_average() -> None:
    first, second = report((1.0, 30)), report((1.0, 10))
    first.claims, first.claimed = 3, 30
    second.claims, second.claimed = 1, 10
    assert figures(0.0, [first, second], []).batch == 10
    assert figures(0.0, [report((1.0, 1))], []).batch == 0


def test_waits_lead_from_the_enqueue_to_the_handler_and_leave_out_the_warm_up() -> None:
    worker, producer = report((99.0, 100)), report()
    producer.sent = {n: float(n) for n in range(100)}
    worker.begun = {n: n + (9.0 if n < WARM_UP else 0.002) for n in range(100)}
    assert figures(0.0, [worker], [producer]).waits_ms == pytest.approx([2.0] * (100 - WARM_UP))


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.95, 95), (0.99, 99), (1.0, 100)])
def test_a_percentile_is_a_value_that_so_many_do_not_exceed(share: float, expected: int) -> None:
    assert percentile(list(range(100, 0, -1)), share) == expected


def test_the_percentile_of_few_values_is_one_of_them() -> None:
    assert percentile([7.0], 0.99) == 7
    assert percentile([1.0, 2.0], 0.5) == 1


def test_the_summary_has_medians_and_the_range_of_the_ratios() -> None:
    pairs = [(run(10), run(20)), (run(30), run(40)), (run(20), run(100))]
    found = summarised(pairs, of_rates)
    assert (found["rate"], found["bare_rate"]) == (20, 40)
    assert found["ratio"] == 0.5
    assert found["ratio_range"] == [0.2, 0.75]
    assert found["rate_range"] == [10, 30]
    assert (found["client_cpu_us"], found["bare_client_cpu_us"]) == (2, 4)


def test_an_even_number_of_runs_has_the_middle_of_two_for_its_median() -> None:
    assert summarised([(run(10), run(10)), (run(20), run(10))], of_rates)["rate"] == 15


def test_memory_is_that_of_the_worst_run() -> None:
    found = summarised([(run(10), run(10)), (run(90), run(10)), (run(20), run(10))], of_rates)
    assert found["memory_mb"] == [1.0, 90]
    assert found["peak_rss_mb"] == 90


def test_waits_are_told_by_their_percentiles_and_compared_by_their_median() -> None:
    slow, fast = tuple(float(n) for n in range(2, 202, 2)), tuple(float(n) for n in range(1, 101))
    found = summarised([(run(50, slow), run(50, fast))], of_waits)
    assert (found["p50_ms"], found["p95_ms"], found["p99_ms"], found["max_ms"]) == (100, 190, 198, 200)
    assert (found["bare_p50_ms"], found["bare_max_ms"]) == (50, 100)
    assert found["ratio"] == 2


def test_under_a_pinned_horizon_the_last_fifth_is_compared_with_the_first() -> None:
    found = summarised([(run(1, fifths=(10.0, 9.0, 9.0, 9.0, 8.0)), run(1))], of_fifths)
    assert found["ratio"] == pytest.approx(0.8)
    assert found["fifths"] == [10, 9, 9, 9, 8]
