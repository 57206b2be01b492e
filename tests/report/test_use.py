"""What a model is expected to be worth in use, by its held-out loss."""

import pytest

from bert_pretrain.report.use import BETTER, MEASURED, VOCAB_SIZE, expected_use, use_of


@pytest.mark.parametrize("language", MEASURED)
def test_less_loss_is_worth_no_less_and_what_lies_beyond_is_said(language: str) -> None:
    losses = [loss for loss, _ in MEASURED[language]]
    inside = [expected_use(loss, VOCAB_SIZE, language) for loss in sorted(losses)]
    points = [use.points for use in inside if use]
    assert points == sorted(points, reverse=True)
    assert all(use is not None and use.is_measured for use in inside)
    for beyond in (expected_use(min(losses) - 0.5, VOCAB_SIZE, language), expected_use(9.0, VOCAB_SIZE, language)):
        assert beyond is not None
        assert not beyond.is_measured
        assert "beyond the measured runs" in str(beyond)


def test_between_measured_losses_points_are_interpolated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MEASURED, "en", ((5.0, -4.0), (4.0, 4.0)))
    use = expected_use(4.5, VOCAB_SIZE, "en")
    assert use is not None
    assert use.points == 0.0
    assert str(use) == "about as good as word counts"
    assert str(expected_use(4.9, VOCAB_SIZE, "en")) == "worse than word counts"
    better = expected_use(4.1, VOCAB_SIZE, "en")
    assert better is not None
    assert better.is_better is (better.points >= BETTER)
    assert expected_use(4.1, VOCAB_SIZE, "fi") is None


def test_a_run_is_judged_by_its_last_evaluation_and_only_with_what_its_manifest_says() -> None:
    record = {"data": {"statistics": {"vocab_size": VOCAB_SIZE, "language": "en"}}}
    lines = [{"validation_mlm_loss": 9.0}, {"step": 3}, {"validation_mlm_loss": 4.5}, {"step": 5}]
    assert use_of(record, lines) == expected_use(4.5, VOCAB_SIZE, "en")
    assert use_of(record, lines[1:2]) is None
    assert use_of({"data": {"statistics": {"vocab_size": VOCAB_SIZE}}}, lines) is None
