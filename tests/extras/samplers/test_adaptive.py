"""Rows by their rewards: weights by hand, the order, what is observed, resume to the bit, bad input."""

import re
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback

from lightning_rlhf import PromptDataModule
from lightning_rlhf.callbacks import DynamicSampling, RunCheckpoint
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.samplers import shuffle
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.samplers.adaptive import Adaptive
from lightning_rlhf.extras.samplers.curriculum import Curriculum
from lightning_rlhf.extras.samplers.feedback import RewardFeedback
from lightning_rlhf.extras.samplers.history import RowHistory
from lightning_rlhf.extras.samplers.row_weights import Gates, Learnability, Pools, Retire
from lightning_rlhf.objectives.corrections import RolloutCorrection
from lightning_rlhf.rewards.function import RewardFunction
from tests.callbacks.test_staleness import Interrupt
from tests.data.rows_given import error_of
from tests.helpers import assert_close, float64, properties
from tests.stand_ins import TinyModel, each


def history_of(*groups, kept=1.0, rows=None):
    """Return the history of (row, rewards) in successive steps."""
    history = RowHistory.of(rows or 1 + max(row for row, _ in groups), kept)
    for step, (row, rewards) in enumerate(groups):
        history.step = step
        history.add(row, rewards, threshold=1.0)
        history.step = step + 1
    return history


# -- history and weights by hand -----------------------------------------------------------------------------------


def test_history_by_hand():
    history = history_of((0, [1.0, 0.0, 0.5, 2.0]), (1, [1.0, 1.0]), (0, [1.0, 1.0]), (0, [0.0, 1.0]), kept=0.5, rows=3)
    # Row 0: 2 of 4, then 2 of 2, then 1 of 2, each time half of what was before.
    assert history.solved.tolist() == [(2 / 2 + 2) / 2 + 1, 2, 0]
    assert history.unsolved.tolist() == [(2 / 2 + 0) / 2 + 1, 0, 0]
    assert_close(history.solve_rate[:2], float64([2.5 / 4, 1.0]))
    assert history.observed.tolist() == [True, True, False]
    assert history.groups.tolist() == [3, 1, 0]
    assert history.streak.tolist() == [0, 1, 0]
    assert history.spread[:2].tolist() == [1.0, 0.0]
    assert history.last_step.tolist() == [3, 1, -1]


def test_pools_by_hand():
    history = history_of((0, [1.0] * 4), (1, [0.0] * 4), (2, [1.0, 0.0]), rows=4)
    pools = Pools(easy=0.2, useful=1.0, impossible=0.3, unseen=0.7)
    assert pools.weights(history, [None] * 4).tolist() == [0.2, 0.3, 1.0, 0.7]
    wide = Pools(easy=0.2, impossible=0.3, low=0.5, high=0.5)
    assert wide.weights(history, [None] * 4).tolist() == [0.2, 0.3, 1.0, 1.0]


def test_learnability_is_the_mean_of_the_variance_over_a_beta_distribution():
    history = history_of((0, [1.0] * 3 + [0.0]), (1, [0.0] * 8), rows=3)
    weights = Learnability(least=0.0).weights(history, [None] * 3)
    probability = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    for row, (solved, unsolved) in enumerate([(3, 1), (0, 8), (0, 0)]):
        density = probability**solved * (1 - probability) ** unsolved
        expected = (density * probability * (1 - probability)).sum() / density.sum()
        assert_close(weights[row], expected, rtol=1e-6)
    assert_close(weights[2], float64(1 / 6))
    bounded = Learnability(least=0.9).weights(history, [None] * 3)
    assert_close(bounded, float64([8 / 42, 0.9 * 8 / 42, 0.9 * 8 / 42]))


def test_gates_open_level_by_level_and_close_again():
    levels, gates = [1, 1, 2, 2, 5], Gates("level", solved=0.75, rows=2)

    def is_open(*groups):
        return gates.weights(history_of(*groups, kept=0.0, rows=5), levels).tolist()

    assert is_open((0, [1.0])) == [1, 1, 0, 0, 0]  # one row of level 1 is missing
    assert is_open((0, [1.0]), (1, [1.0, 0.0])) == [1, 1, 1, 1, 0]  # a mean of exactly 0.75
    assert is_open((0, [1.0]), (1, [0.0])) == [1, 1, 0, 0, 0]
    assert is_open((0, [1.0]), (1, [1.0]), (2, [1.0]), (3, [1.0])) == [1, 1, 1, 1, 1]
    assert is_open((0, [1.0]), (1, [1.0]), (2, [1.0]), (3, [1.0]), (0, [0.0])) == [1, 1, 0, 0, 0]


def test_gate_of_a_level_with_few_rows_asks_for_all_of_them():
    history = history_of((0, [1.0]), (1, [1.0]), rows=3)
    assert Gates("level", rows=100).weights(history, [1, 1, 2]).tolist() == [1, 1, 1]


def test_solved_rows_retire_and_return():
    history = history_of((0, [1.0]), (0, [1.0, 1.0]), (1, [1.0]), (2, [1.0]), (2, [0.0]), rows=4)
    assert Retire().weights(history, [None] * 4).tolist() == [0, 1, 1, 1]
    assert Retire(groups=1).weights(history, [None] * 4).tolist() == [0, 0, 1, 1]
    assert Retire(groups=1, rest=3).weights(history, [None] * 4).tolist() == [1, 0, 1, 1]  # rows of steps 1 and 2


# -- the order -----------------------------------------------------------------------------------------------------


def order_of(*parts, rows=12, batch_size=4, seed=1, keys=None, **options):
    keys = keys or [[None] * len(parts)] * rows
    return Adaptive(list(parts), **options).row_order([(key, None) for key in keys], [1] * rows, seed, batch_size)


def test_equal_weights_give_the_order_of_a_run_without_a_sampler():
    order = order_of(Pools())
    for epoch in range(3):
        read = [row for start in (0, 4, 8) for row in order.rows(epoch)[start : start + 4]]
        assert read == shuffle(12, 1, epoch)


@dataclass
class Fixed:
    values: list

    def key(self, fields):
        return None

    def weights(self, history, keys):
        return torch.tensor(self.values, dtype=torch.float64)


def read(order, batches):
    per_epoch = order.size // order.batch_size
    rows = []
    for batch in range(batches):
        epoch, number = divmod(batch, per_epoch)
        rows.append(order.rows(epoch)[number * order.batch_size : (number + 1) * order.batch_size])
        order.observe({row: [] for row in rows[-1]}, batch)
    return rows


def test_rows_are_read_in_proportion_to_their_weights():
    weights = [1.0] * 20 + [0.5] * 20 + [0.1] * 20
    batches = read(order_of(Fixed([2 * weight for weight in weights]), rows=60, batch_size=2), 4000)
    counts = Counter(row % 60 for batch in batches for row in batch)
    passes = 8000 / sum(weights)
    for row, weight in enumerate(weights):
        deviation = (passes * weight * (1 - weight)) ** 0.5
        assert abs(counts[row] - passes * weight) <= 4 * deviation + 3  # a row is rarely twice in the same batch


@properties
@given(st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0, 7.0]), min_size=4, max_size=20), st.integers(0, 99))
def test_no_row_is_twice_in_a_batch_and_rows_without_weight_only_fill_it(weights, seed):
    order = order_of(Fixed(weights), rows=len(weights), batch_size=4, seed=seed)
    usable = sum(weight > 0 for weight in weights)
    for number in range(6):
        epoch, batch = divmod(number, order.size // 4)
        rows = [row % len(weights) for row in order.rows(epoch)[4 * batch : 4 * batch + 4]]
        assert len(set(rows)) == 4
        without = sum(weights[row] == 0 for row in rows)
        assert without == max(4 - usable, 0) == order.filled[number]


def test_rows_that_repeat_in_an_epoch_have_different_numbers_and_return_to_the_plain_one():
    batches = read(order_of(Fixed([1.0] * 4 + [0.0] * 8)), 6)
    assert [sorted(row % 12 for row in batch) for batch in batches] == [[0, 1, 2, 3]] * 6
    for epoch in (batches[:3], batches[3:]):
        assert sorted(row for batch in epoch for row in batch) == sorted(
            row + 12 * k for row in range(4) for k in range(3)
        )


def test_rows_to_which_nothing_was_generated_come_first_in_the_next_batch():
    order = order_of(Pools())
    first = order.rows(0)[0:4]
    order.observe({first[1]: [1.0], first[3]: []}, 0)
    second = order.rows(0)[4:8]
    assert second == [first[0] + 12, first[2] + 12, *shuffle(12, 1, 0)[4:6]]  # with their second seeds
    order.observe({number: [] for number in second}, 1)
    assert order.rows(0)[8:12] == shuffle(12, 1, 0)[6:10]


def test_base_orders_the_passes():
    parts, keys = [Pools()], [([None], level) for level in [3, 1, 2, 0, 5, 4]]
    order = Adaptive(parts, base=Curriculum("level", epochs=9)).row_order(keys, [1] * 6, 0, 2)
    assert [row for start in (0, 2, 4) for row in order.rows(0)[start : start + 2]] == [3, 1, 2, 0, 5, 4]


def test_base_with_fewer_rows_than_a_batch_is_filled_with_others():
    @dataclass
    class First:
        def key(self, fields):
            return None

        def order(self, keys, lengths, seed, epoch):
            return [0, 1, 2, 0]

    order = Adaptive([Pools()], base=First()).row_order([([None], None)] * 6, [1] * 6, 0, 4)
    assert sorted(order.rows(0)[0:4]) == [0, 1, 2, 3]


# -- runs ----------------------------------------------------------------------------------------------------------

LETTERS = [{"prompt": "abcd"[i % 4] * (1 + i // 4), "answer": "abcdefg"[i % 7], "level": i % 3} for i in range(8)]


class Seen(Callback):
    """Keeps the rows of each step, and the rewards of their responses."""

    def __init__(self):
        self.rows = []
        self.rewards = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.rows.append(each(batch, "index"))
        self.rewards.append(pl_module.last_step.experience.reward.tolist())


def trained(run, sampler, steps=6, callbacks=(), resume=None, loop=(), batch_size=2, trainer=()):
    seen = Seen()
    made = run(
        loop={"group_size": 2, "validate_at_ends": False, **dict(loop)},
        model={"actor": TinyModel(), "minibatch_size": 4, "correction": RolloutCorrection(level="token")},
        data={"train": InMemory(LETTERS), "batch_size": batch_size, "sampler": sampler},
        trainer={"max_steps": steps, "max_epochs": -1, "enable_checkpointing": bool(callbacks), **dict(trainer)},
        callbacks=[seen, *callbacks],
        texts=tuple("abcde"),
    )
    made.fit(ckpt_path=resume)
    made.seen = seen
    return made


def test_run_without_effect_of_rewards_equals_one_without_a_sampler(run):
    plain = trained(run, None)
    adaptive = trained(run, Adaptive([Pools(easy=1.0, impossible=1.0)]))
    assert adaptive.seen.rows == plain.seen.rows
    assert adaptive.seen.rewards == plain.seen.rewards
    assert all(map(torch.equal, plain.module.actor.parameters(), adaptive.module.actor.parameters()))


def test_run_leaves_solved_rows_out_and_logs_what_it_has_observed(run):
    def same(completions, answer):
        return [float(right in "abc") for right in answer]

    sampler = Adaptive([Retire(groups=1)])
    made = trained(run, sampler, steps=8, loop={"rewards": [RewardFunction(same)]})
    rows = [[row % 8 for row in step] for step in made.seen.rows]
    solved = {row for row in range(8) if LETTERS[row]["answer"] in "abc"}
    assert sorted(row for step in rows[:4] for row in step) == list(range(8))
    assert not solved & {row for step in rows[4:] for row in step}
    assert made.metrics["sampler/observed_fraction"] == 1.0
    assert made.metrics["sampler/left_out_fraction"] == len(solved) / 8
    assert made.metrics["sampler/solve_rate"] == len(solved) / 8
    assert made.metrics["sampler/filled_fraction"] == 0.0


@pytest.mark.parametrize(("max_staleness", "every"), [(0, 3), (1, 3), (0, 4), (1, 4)])  # 4 is the end of an epoch
def test_resumed_run_has_the_same_bits(run, tmp_path, max_staleness, every):
    def weights(folder, *callbacks, resume=None):
        sampler = Adaptive([Pools(easy=0.3, impossible=0.2), Gates("level", solved=0.2, rows=2)])
        callbacks = [RunCheckpoint(every_n_steps=every), *callbacks]
        loop, root = {"max_staleness": max_staleness}, {"default_root_dir": tmp_path / folder}
        made = trained(run, sampler, steps=11, callbacks=callbacks, resume=resume, loop=loop, trainer=root)
        return [parameter.detach().clone() for parameter in made.module.actor.parameters()], made.seen.rows

    whole, rows = weights("whole")
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        weights("cut", Interrupt(7))
    resumed, later = weights("cut", resume=tmp_path / "cut/checkpoints/last.ckpt")
    assert later == rows[7 // every * every :]
    assert all(map(torch.equal, whole, resumed))


def test_batch_is_chosen_by_the_rewards_that_are_known_when_it_is_requested(run):
    def solved_by_row(completions, answer):
        return [1.0] * len(completions)

    def rows(max_staleness):
        loop = {"rewards": [RewardFunction(solved_by_row)], "max_staleness": max_staleness}
        made = trained(run, Adaptive([Retire(groups=1)]), steps=6, loop=loop)
        return [[row % 8 for row in step] for step in made.seen.rows]

    plain, ahead = rows(0), rows(2)
    assert ahead[:4] == plain[:4]  # the first pass
    assert len({row for step in plain[:4] for row in step}) == 8


def test_prompts_that_dynamic_sampling_has_left_out_are_observed(run):
    def half(completions, answer):
        return [float(right in "ab") * (k % 2) for k, right in enumerate(answer)]

    loop = {"rewards": [RewardFunction(half)], "dynamic_sampling": DynamicSampling(2)}
    seen = Observed()
    made = trained(run, Adaptive([Pools()]), steps=3, loop=loop, batch_size=4, callbacks=[seen])
    generated = {row % 8 for step in seen.groups for row in step}
    trained_on = {row % 8 for step in made.seen.rows for row in step}
    assert all(len(step) in (2, 4) for step in seen.groups)
    assert all(len(rewards) == 2 for step in seen.groups for rewards in step.values())
    assert generated <= trained_on
    assert any(len(step) == 4 for step in seen.groups)  # two of them are not trained on


class Observed(Callback):
    """Keeps what the sampler is given in each step."""

    def __init__(self):
        self.groups = []

    def on_train_start(self, trainer, pl_module):
        order = trainer.datamodule.sampler._feedback._order
        observe = order.observe

        def kept(groups, step):
            self.groups.append({number: list(rewards) for number, rewards in groups.items()})
            observe(groups, step)

        order.observe = kept


def test_named_reward_is_compared_with_its_threshold(run):
    def length(completions, answer):
        return [0.7] * len(completions)

    rewards = [RewardFunction(length), RewardFunction(lambda completions: [5.0] * len(completions), name="other")]
    for sampler, rate in [
        (Adaptive([Pools()], solved=0.7, reward="length"), 1.0),
        (Adaptive([Pools()], solved=0.71, reward="length"), 0.0),
        (Adaptive([Pools()], solved=5.7), 1.0),
    ]:
        assert trained(run, sampler, steps=1, loop={"rewards": rewards}).metrics["sampler/solve_rate"] == rate


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Adaptive([]), "parts of Adaptive is empty: give it at least one, such as Pools"),
        (lambda: Adaptive([Pools()], kept=1.5), "kept must lie in [0, 1], got 1.5"),
        (lambda: Pools(easy=-1), "easy must be at least 0, got -1"),
        (lambda: Pools(low=0.9, high=0.1), "low of Pools must be at most high, got 0.9 and 0.1"),
        (lambda: Gates("level", rows=0), "rows must be at least 1, got 0"),
        (lambda: Retire(rest=0), "rest must be at least 1 or null, got 0"),
        (lambda: Learnability(2.0), "least must lie in [0, 1], got 2.0"),
        (lambda: order_of(Fixed([-1.0] * 12)).rows(0)[0:4], "Fixed returned weights of shape (12,) from -1.0 to -1.0"),
        (
            lambda: order_of(Fixed([1.0] * 11)).rows(0)[0:4],
            "of shape (11,) from 1.0 to 1.0, expected 12 finite weights",
        ),
        (lambda: order_of(Pools(), rows=3), "batch_size is 4, but Adaptive reads no row twice in a batch of 3"),
        (
            lambda: Gates("level").weights(RowHistory.of(101, 0.5), list(range(101))),
            "column 'level' of Gates has 101 different values, more than 100 levels: round them",
        ),
        (
            lambda: RowHistory.of(4, 0.5).load_state_dict(RowHistory.of(3, 0.5).state_dict()),
            "the sampler of the checkpoint has observed 3 training rows, but there are 4: resume with the same data",
        ),
    ],
)
def test_bad_settings_are_one_sentence(make, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        make()


def test_row_without_level_is_a_bad_row():
    sampler = Adaptive([Gates("level")])
    assert "given:1: no column 'level'" in error_of(PromptDataModule, {"prompt": "why"}, sampler=sampler)
    row = {"prompt": "why", "level": "2"}
    assert "level holds str, expected a number" in error_of(PromptDataModule, row, sampler=sampler)


def test_runs_without_the_rewards_that_a_sampler_needs_are_rejected(run):
    with pytest.raises(UsageError, match=r"Adaptive has reward 'right', which is not among \['exact'\]"):
        trained(run, Adaptive([Pools()], reward="right"))


def test_second_fit_observes_anew_with_one_callback(run):
    made = trained(run, Adaptive([Retire(groups=1)]), steps=2)
    made.trainer.fit_loop.epoch_loop.max_steps = 4
    made.fit()
    assert sum(isinstance(callback, RewardFeedback) for callback in made.trainer.callbacks) == 1
