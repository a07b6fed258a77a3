"""plan/failures: models of the time to a failure, fits, MTBF against nodes, reading a log."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import InvalidRequestError, NotFoundError
from holdfast.plan.failures.fitting import fit
from holdfast.plan.failures.log import read_log
from holdfast.plan.failures.models import (
    FAMILIES,
    Exponential,
    FailureModel,
    Family,
    Gamma,
    LogNormal,
    Trace,
    Weibull,
    from_mean_median,
)
from holdfast.plan.failures.nodes import independent, line, linear, node_chance

MODELS: list[Family] = [
    Gamma(0.68, 41.2), Gamma(3.0, 5.0), Exponential(28.0), Weibull(0.7, 20.0), Weibull(2.5, 14.0),
    LogNormal(8.0, 0.9),
]  # fmt: skip
RECORDED = Trace((12.0, 0.5, 31.0, 7.25, 2.0, 90.0, 7.25, 18.0))
ALL: list[FailureModel] = [*MODELS, RECORDED]
hours = st.floats(min_value=0.01, max_value=500)


def rng(seed: int = 20) -> np.random.Generator:
    return np.random.default_rng(seed)


# -- every model


@pytest.mark.parametrize("model", ALL, ids=str)
def test_survival_falls_from_one_to_zero(model: FailureModel) -> None:
    t_h = np.concatenate([[0.0], np.geomspace(1e-6, 1e6, 400), [np.inf]])
    survival = model.survival(t_h)
    assert survival[0] == 1
    assert survival[-1] == 0
    assert np.all(np.diff(survival) <= 0)
    assert survival[200] < survival[0]


@pytest.mark.parametrize("model", ALL, ids=str)
def test_half_of_the_runs_survive_the_median(model: FailureModel) -> None:
    assert float(model.survival(model.median_h)) == pytest.approx(0.5, abs=1e-9)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_mean_is_the_area_under_survival(model: Family) -> None:
    t_h = np.geomspace(1e-9, 1e4, 40_001)
    area = float(np.trapezoid(model.survival(t_h), t_h))
    assert area == pytest.approx(model.mean_h, rel=1e-3)


@pytest.mark.parametrize("model", ALL, ids=str)
def test_samples_have_the_models_mean_median_and_survival(model: FailureModel) -> None:
    times = model.sample(rng(), (200, 100))
    assert times.shape == (200, 100)
    assert times.min() > 0
    error = times.std() / math.sqrt(times.size)
    assert abs(times.mean() - model.mean_h) < 4 * error
    assert float((times > model.median_h).mean()) == pytest.approx(
        float(model.survival(model.median_h)), abs=0.015
    )
    for t_h in (1.0, 10.0, 50.0):
        found = float((times > t_h).mean())
        assert found == pytest.approx(float(model.survival(t_h)), abs=0.015)


@pytest.mark.parametrize("model", ALL, ids=str)
def test_the_same_seed_gives_the_same_samples(model: FailureModel) -> None:
    assert np.array_equal(model.sample(rng(3), 50), model.sample(rng(3), 50))
    assert not np.array_equal(model.sample(rng(3), 50), model.sample(rng(4), 50))


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_density_is_the_fall_of_survival(model: Family) -> None:
    t_h = np.array([0.3, 2.0, 9.0, 25.0, 60.0])
    step = 1e-4
    fall = (model.survival(t_h - step) - model.survival(t_h + step)) / (2 * step)
    assert np.exp(model.log_density(t_h)) == pytest.approx(fall, rel=1e-4, abs=1e-9)


def test_gamma_and_weibull_of_shape_one_are_the_exponential() -> None:
    t_h = np.linspace(0, 100, 50)
    expected = Exponential(28.0).survival(t_h)
    assert Gamma(1.0, 28.0).survival(t_h) == pytest.approx(expected)
    assert Weibull(1.0, 28.0).survival(t_h) == pytest.approx(expected)
    assert Gamma(1.0, 28.0).median_h == pytest.approx(Exponential(28.0).median_h)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_times_are_hours(model: Family) -> None:
    in_hours = model.sample(rng(), 400)
    in_days = type(model).likeliest(in_hours / 24)
    assert type(model).likeliest(in_hours).mean_h == pytest.approx(24 * in_days.mean_h)
    assert Exponential(24.0).survival(24.0) == pytest.approx(math.exp(-1))  # one mean, one day


@pytest.mark.parametrize("model", ALL, ids=str)
@pytest.mark.parametrize("t_h", [-1.0, math.nan, [3.0, -0.001]])
def test_survival_of_a_negative_time_is_refused(model: FailureModel, t_h: float) -> None:
    with pytest.raises(InvalidRequestError, match="negative or not a number"):
        model.survival(t_h)


@pytest.mark.parametrize("value", [0, -3.0, math.nan, math.inf, "12", None, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: Gamma(x, 1.0), lambda x: Gamma(1.0, x), lambda x: Exponential(x),
        lambda x: Weibull(x, 1.0), lambda x: Weibull(1.0, x), lambda x: LogNormal(x, 1.0),
        lambda x: LogNormal(1.0, x), lambda x: from_mean_median("gamma", x, 8.0),
        lambda x: from_mean_median("gamma", 14.0, x),
    ],
)  # fmt: skip
def test_parameters_that_are_not_positive_numbers_are_refused(
    make: Callable[[object], object], value: object
) -> None:
    with pytest.raises(InvalidRequestError, match="number") as caught:
        make(value)
    assert caught.value.todo


# -- a recorded trace


@given(times=st.lists(hours, min_size=1, max_size=30), t_h=hours)
@settings(max_examples=60, deadline=None)
def test_a_traces_survival_is_the_share_of_longer_times(times: list[float], t_h: float) -> None:
    trace = Trace(tuple(times))
    for asked in (t_h, *times):
        share = sum(time > asked for time in times) / len(times)
        assert float(trace.survival(asked)) == pytest.approx(share)
    assert trace.mean_h == pytest.approx(sum(times) / len(times))
    assert sum(time < trace.median_h for time in times) <= len(times) / 2
    assert sum(time > trace.median_h for time in times) <= len(times) / 2
    assert trace.times_h == tuple(times)  # in the order recorded
    assert set(trace.sample(rng(), 40).tolist()) <= set(times)


def test_traces_of_the_same_times_are_equal_and_cannot_be_changed() -> None:
    assert Trace((1.0, 2.0)) == Trace((1.0, 2.0)) != Trace((2.0, 1.0))
    drawn = RECORDED.sample(rng(), 5)
    drawn[:] = 0
    assert min(RECORDED.times_h) == 0.5
    assert float(RECORDED.survival(0.4)) == 1


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ((), "no times"),
        ((3.0, -1.0), "greater than zero"),
        ((3.0, 0.0), "greater than zero"),
        ((3.0, math.nan), "greater than zero"),
        ((3.0, math.inf), "greater than zero"),
        (("a", "b"), "not a list of numbers"),
        ((None, 1.0), "not a list of numbers"),
        ((True, False), "not a list of numbers"),
        (((1.0, 2.0), (3.0, 4.0)), "not a list of numbers"),
        (((1.0, 2.0), 3.0), "not a list of numbers"),
        (5.0, "not a list of numbers"),
    ],
)
@pytest.mark.parametrize("use", [Trace, fit])
def test_nonsense_times_are_refused(
    use: Callable[[object], object], times: object, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        use(times)
    assert caught.value.todo


# -- from a mean and a median


@pytest.mark.parametrize("family", ["gamma", "weibull", "log-normal"])
@pytest.mark.parametrize(("mean_h", "median_h"), [(14, 8), (30, 17), (28, 16), (14, 9), (30, 1)])
def test_a_model_has_the_mean_and_median_it_was_made_from(
    family: str, mean_h: float, median_h: float
) -> None:
    model = from_mean_median(family, mean_h, median_h)
    assert model.family == family
    assert model.mean_h == pytest.approx(mean_h, rel=1e-12)
    assert model.median_h == pytest.approx(median_h, rel=1e-12)
    assert float(model.survival(median_h)) == pytest.approx(0.5, abs=1e-12)


@given(mean_h=hours, ratio=st.floats(min_value=1e-6, max_value=0.9999))
@settings(max_examples=60, deadline=None)
def test_every_median_below_the_mean_has_its_gamma(mean_h: float, ratio: float) -> None:
    model = from_mean_median("gamma", mean_h, mean_h * ratio)
    assert model.mean_h == pytest.approx(mean_h, rel=1e-12)
    assert model.median_h == pytest.approx(mean_h * ratio, rel=1e-9)


def test_the_papers_mean_and_median_crowd_failures_at_the_start() -> None:
    for mean_h, median_h in ((14, 8), (30, 17)):
        model = from_mean_median("gamma", mean_h, median_h)
        assert isinstance(model, Gamma)
        assert 0.6 < model.shape < 0.8
        chance = 1 - model.survival(np.arange(1, 60)) / model.survival(np.arange(59))
        assert np.all(np.diff(chance) < 0)  # figure 3b: high at first,
        assert chance[0] > 1.5 * chance[20]
        assert chance[20] < 1.2 * chance[50]  # then nearly constant


@pytest.mark.parametrize("family", ["gamma", "log-normal"])
@pytest.mark.parametrize("median_h", [14.0, 14.001, 30.0])
def test_a_median_at_or_above_the_mean_has_no_gamma(family: str, median_h: float) -> None:
    with pytest.raises(InvalidRequestError, match=f"no {family} has.*stays below its mean"):
        from_mean_median(family, 14.0, median_h)


def test_a_median_next_to_nothing_has_no_gamma_of_use() -> None:
    with pytest.raises(InvalidRequestError, match="no gamma of use"):
        from_mean_median("gamma", 14.0, 1e-60)


def test_a_weibulls_median_may_pass_its_mean_by_little() -> None:
    model = from_mean_median("weibull", 14.0, 14.1)
    assert (model.mean_h, model.median_h) == pytest.approx((14.0, 14.1))
    with pytest.raises(InvalidRequestError, match="no weibull has"):
        from_mean_median("weibull", 14.0, 15.0)


def test_an_exponential_is_made_only_from_its_own_median() -> None:
    assert from_mean_median("exponential", 28.0, 19.4) == Exponential(28.0)
    with pytest.raises(InvalidRequestError, match=r"0\.693 of its mean"):
        from_mean_median("exponential", 28.0, 16.0)


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequestError, match="gamma, exponential, weibull, log-normal"):
        from_mean_median("pareto", 28.0, 16.0)


# -- fits


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_fitting_samples_recovers_the_parameters_and_ranks_the_family_first(model: Family) -> None:
    fits = fit(model.sample(rng(), 4000), draws=5)
    assert {found.model.family for found in fits} == set(FAMILIES)
    assert [f.aic for f in fits] == sorted(f.aic for f in fits)
    own = next(found for found in fits if type(found.model) is type(model))
    assert astuple(own.model) == pytest.approx(astuple(model), rel=0.08)
    assert own.aic - fits[0].aic < 2  # the first, or nothing but noise away from it
    assert own.ks < 0.03
    assert own.survival_rmse < 0.02


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_no_nearby_parameters_are_likelier_than_the_fitted(model: Family) -> None:
    times = model.sample(rng(7), 300)
    best = type(model).likeliest(times)
    top = float(best.log_density(times).sum())
    values = astuple(best)
    for at in range(len(values)):
        for factor in (0.99, 1.01):
            moved = [*values]
            moved[at] *= factor
            assert float(type(model)(*moved).log_density(times).sum()) < top


def test_aic_counts_the_parameters_of_each_family() -> None:
    times = np.array(RECORDED.times_h)
    parameters = {"gamma": 2, "exponential": 1, "weibull": 2, "log-normal": 2}
    for found in fit(times, draws=1):
        likelihood = float(found.model.log_density(times).sum())
        assert found.aic == pytest.approx(2 * parameters[found.model.family] - 2 * likelihood)


def test_a_wrong_family_is_told_by_every_measure() -> None:
    fits = {f.model.family: f for f in fit(LogNormal(8.0, 1.2).sample(rng(), 1500), draws=60)}
    right, wrong = fits["log-normal"], fits["exponential"]
    assert right.times == 1500
    assert wrong.aic > right.aic + 10
    assert wrong.ks > 2 * right.ks
    assert wrong.survival_rmse > 2 * right.survival_rmse
    assert wrong.ks_p < 0.05 < right.ks_p


def test_goodness_of_fit_is_the_gap_between_recorded_and_modelled_survival() -> None:
    times = np.sort(Gamma(0.7, 40.0).sample(rng(5), 60))
    trace = Trace(tuple(times.tolist()))
    for found in fit(times, draws=1):
        after = trace.survival(times)
        before = trace.survival(np.nextafter(times, 0))
        modelled = found.model.survival(times)
        gap = max(np.abs(modelled - after).max(), np.abs(modelled - before).max())
        assert found.ks == pytest.approx(gap)
        middle = (after + before) / 2
        assert found.survival_rmse == pytest.approx(math.sqrt(((modelled - middle) ** 2).mean()))
        assert found.survival_rmse <= found.ks


@pytest.mark.parametrize("model", [Gamma(0.68, 41.2), Exponential(28.0)], ids=str)
def test_p_is_even_where_the_family_is_right(model: Family) -> None:
    chances = []
    for seed in range(30):
        fits = fit(model.sample(rng(seed), 40), draws=19, seed=seed)
        chances.append(next(f.ks_p for f in fits if type(f.model) is type(model)))
    # A p that takes the parameters as known beforehand has a mean above 0.7 here.
    assert 0.35 < np.mean(chances) < 0.65
    assert sum(p <= 0.1 for p in chances) <= 8


def test_p_of_a_long_log_agrees_with_that_of_a_short_one() -> None:
    """Long logs are judged against shorter draws: the right family must still pass."""
    chances = [
        fit(Exponential(28.0).sample(rng(seed), 5000), draws=19, seed=seed) for seed in range(6)
    ]
    own = [f.ks_p for fits in chances for f in fits if f.model.family == "exponential"]
    assert 0.2 < np.mean(own) < 0.8


def test_the_same_log_and_seed_give_the_same_fits() -> None:
    times = RECORDED.times_h
    assert fit(times, draws=20, seed=1) == fit(times[::-1], draws=20, seed=1)


@pytest.mark.parametrize("times", [(1.0, 2.0), (1e-5, 1e5), (3.0, 3.0, 3.1), (1, 2, 4)])
def test_few_times_are_fitted_without_a_warning(times: tuple[float, ...]) -> None:
    for found in fit(times, draws=20):
        assert math.isfinite(found.aic)
        assert 0 < found.ks_p <= 1


def test_one_time_or_equal_times_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="one time between failures"):
        fit([12.0])
    with pytest.raises(InvalidRequestError, match="all times between failures are the same"):
        fit([12.0, 12.0, 12.0])


@pytest.mark.parametrize("draws", [0, -1, 2.5, True])
def test_nonsense_draws_are_refused(draws: int) -> None:
    with pytest.raises(InvalidRequestError, match="draws"):
        fit([1.0, 2.0], draws=draws)


# -- MTBF against nodes

NODES = np.array([1, 2, 8, 64, 1000, 100_000])


def test_linear_mtbf_keeps_nodes_times_mtbf() -> None:
    assert linear(28.0, 38)(NODES) * NODES == pytest.approx(28.0 * 38)


def test_independent_mtbf_is_the_papers_formula() -> None:
    p = 0.003
    assert independent(p)(NODES) == pytest.approx(1 / (1 - (1 - p) ** NODES))
    assert float(independent(p)(1)) == pytest.approx(1 / p)
    assert np.all(independent(p)(NODES) >= 1)


def test_independent_mtbf_is_linear_for_rare_failures() -> None:
    p = 1e-9
    assert independent(p)(NODES) == pytest.approx(linear(1 / p, 1)(NODES), rel=1e-4)


@given(mtbf_h=st.floats(min_value=1.01, max_value=1e4), nodes=st.integers(1, 100_000))
@settings(max_examples=60, deadline=None)
def test_a_nodes_chance_gives_back_the_mtbf(mtbf_h: float, nodes: int) -> None:
    assert float(independent(node_chance(mtbf_h, nodes))(nodes)) == pytest.approx(mtbf_h)
    assert float(linear(mtbf_h, nodes)(nodes)) == pytest.approx(mtbf_h)


def test_a_line_passes_its_two_points_and_ends_where_it_reaches_zero() -> None:
    mtbf = line((40, 15.0), (10, 30.0))
    assert mtbf([10, 25, 40]).tolist() == [30.0, 22.5, 15.0]
    assert float(mtbf(69)) == pytest.approx(0.5)
    with pytest.raises(InvalidRequestError, match="reaches zero") as caught:
        mtbf([10, 70])
    assert caught.value.facts["zero_at_nodes"] == pytest.approx(70)
    flat = line((10, 30.0), (40, 30.0))
    assert float(flat(100_000)) == 30.0


@pytest.mark.parametrize(
    "make", [lambda n: linear(28.0, n), lambda n: linear(28.0, 20)(n),
             lambda n: independent(0.1)(n), lambda n: node_chance(28.0, n),
             lambda n: line((n, 20.0), (40, 10.0)), lambda n: line((2, 20.0), (40, 19.0))(n)],
)  # fmt: skip
@pytest.mark.parametrize("nodes", [0, -4, 0.5, math.nan, math.inf])
def test_less_than_one_node_is_refused(make: Callable[[object], object], nodes: float) -> None:
    with pytest.raises(InvalidRequestError, match="one node or more"):
        make(nodes)


@pytest.mark.parametrize("p", [0, 1, -0.1, 1.5, math.nan, "0.1"])
def test_a_chance_outside_zero_to_one_is_refused(p: float) -> None:
    with pytest.raises(InvalidRequestError, match="p_per_hour is not a number between 0 and 1"):
        independent(p)


@pytest.mark.parametrize(
    "make", [lambda: linear(0, 20), lambda: linear(-1.0, 20), lambda: node_chance(1.0, 20),
             lambda: node_chance(0.5, 20), lambda: line((10, 0.0), (20, 5.0)),
             lambda: line((10, 5.0), (10, 4.0)), lambda: line((10, 5.0), (20, 6.0)),
             lambda: independent(0.1)("many"), lambda: independent(0.1)([])],
)  # fmt: skip
def test_nonsense_about_nodes_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make()
    assert caught.value.todo


# -- the log


@pytest.fixture
def log(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "failures.csv"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize(
    "text",
    [
        "12.5\n3\n0.25\n",
        "12.5\r\n3\r\n0.25",
        "hours\n12.5\n3\n0.25\n",
        "time_to_failure_h\n 12.5\n\n# a comment\n3\n0.25\n\n",
        "\ufeffhours\n12.5\n3\n0.25\n",
        "\ufeff12.5\n3\n0.25\n",
        '"time between failures (hours)"\n"12.5"\n"3"\n"0.25"\n',
    ],
)
def test_a_column_of_hours_is_read_in_its_order(log: Callable[[str], Path], text: str) -> None:
    assert read_log(log(text)) == (12.5, 3.0, 0.25)
    assert read_log(str(log(text))) == (12.5, 3.0, 0.25)


@pytest.mark.parametrize(
    "text",
    [
        "2026-01-31T12:00:00\n2026-02-01T00:30:00\n2026-02-01 03:30\n2026-02-01T03:45:00\n",
        "failed_at\n2026-01-31T12:00Z\n2026-02-01T02:30+02:00\n2026-02-01T03:30Z\n2026-02-01T03:45Z",
    ],
)
def test_timestamps_give_the_hours_between_them(log: Callable[[str], Path], text: str) -> None:
    assert read_log(log(text)) == pytest.approx((12.5, 3.0, 0.25))


def test_a_named_column_is_read_among_several(log: Callable[[str], Path]) -> None:
    path = log("job,failed_at,up_h\na,2026-01-01,5\nb,2026-01-03,7.5\n")
    assert read_log(path, column="up_h") == (5.0, 7.5)
    assert read_log(path, column="failed_at") == (48.0,)


@given(times=st.lists(hours, min_size=1, max_size=20), header=st.sampled_from(["", "hours\n"]))
@settings(max_examples=40, deadline=None)
def test_what_was_written_is_read_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, times: list[float], header: str
) -> None:
    path = tmp_path_factory.mktemp("log") / "failures.csv"
    path.write_text(header + "".join(f"{time!r}\n" for time in times))
    assert read_log(path) == tuple(times)
    assert Trace(read_log(path)).mean_h == pytest.approx(np.mean(times))


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("", "log is empty", None),
        ("\n\n# nothing\n", "log is empty", None),
        ("hours\n", "log is empty", None),
        ("3\n-2\n", "not greater than zero", 2),
        ("3\n0\n", "not greater than zero", 2),
        ("-3\n", "not greater than zero", 1),
        ("3\nabc\n", "is not a number", 2),
        ("hours\n3\n\nnan\n", "is not a number", 4),
        ("3\ninf\n", "is not a number", 2),
        ("nan\n3\n", "is not a number", 1),
        ("3\n2026-01-01\n", "is not a number", 2),
        ("3..5\n4\n", "neither a number of hours nor an ISO timestamp", 1),
        ("hours\nabc\n", "neither a number of hours nor an ISO timestamp", 2),
        ("12h\n", "neither a number of hours nor an ISO timestamp", 1),
        ("2026-01-01\n2026-01-02\n7\n", "neither a number of hours", 3),
        ("2026-13-01\n2026-01-02\n", "neither a number of hours", 1),
        ("2026-01-01\n2026-01-03\n2026-01-02\n", "do not rise", 3),
        ("2026-01-01\n2026-01-01T00:00\n", "same timestamp", 2),
        ("2026-01-01T00:00\n2026-01-02T00:00Z\n", "with and without a time zone", 2),
        ("2026-01-01\n", "one timestamp gives no time", None),
        ("1767225600\n1767229200\n", "longer than a century", 1),
        ("uptime_s\n3600\n", "not in hours", None),
        ("gap (minutes)\n90\n", "not in hours", None),
        ("Days\n2\n", "not in hours", None),
        ("3,5\n4,5\n", "several columns", None),
        ("hours\n3\n4,5\n", "another number of columns", 3),
        ("job,hours\na,3\n", "several columns", None),
    ],
)
def test_a_log_that_makes_no_sense_is_refused_with_its_line(
    log: Callable[[str], Path], text: str, message: str, line: int | None
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        read_log(log(text))
    assert caught.value.facts.get("line") == line
    assert caught.value.facts["path"]
    assert caught.value.todo


def test_a_column_that_is_not_there_is_refused_with_those_that_are(
    log: Callable[[str], Path],
) -> None:
    with pytest.raises(InvalidRequestError, match="no such column") as caught:
        read_log(log("job,hours\na,3\n"), column="hour")
    assert caught.value.facts["columns"] == ["job", "hours"]
    with pytest.raises(InvalidRequestError, match="no such column"):
        read_log(log("3\n4\n"), column="hours")


def test_a_single_hour_can_be_read_but_not_fitted(log: Callable[[str], Path]) -> None:
    times = read_log(log("12.5\n"))
    assert Trace(times).mean_h == 12.5
    with pytest.raises(InvalidRequestError, match="one time"):
        fit(times)


def test_a_log_that_is_no_text_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such failure log"):
        read_log(tmp_path / "absent.csv")
    with pytest.raises(InvalidRequestError, match="not a CSV text file"):
        read_log(tmp_path)
    path = tmp_path / "binary.csv"
    path.write_bytes(b"\xff\xfe\x00\x81" * 8)
    with pytest.raises(InvalidRequestError, match="not a CSV text file"):
        read_log(path)
