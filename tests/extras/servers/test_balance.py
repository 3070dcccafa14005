"""Which server gets a request: the one that knows most of its text, unless it has too many others."""

import itertools
import random
import time
from collections import Counter

from lightning_rlhf.extras.servers.balance import Balancer


def chosen(balancer, *texts):
    return "".join(str(balancer.choose(text)) for text in texts)


def text(*parts, length=64):
    """Return a text of parts of 64 tokens."""
    return [part for part in parts for _ in range(length)]


def test_requests_without_common_beginnings_alternate():
    assert chosen(Balancer("ab"), *(text(number) for number in range(6))) == "ababab"


def test_responses_to_one_prompt_go_to_one_server_up_to_eight_more_requests():
    balancer = Balancer("ab")
    assert chosen(balancer, *[text(1)] * 9) == "a" * 9
    assert chosen(balancer, text(1)) == "b"
    for _ in range(9):
        balancer.release("a", text(1))
    assert chosen(balancer, text(1)) == "a"  # both have the text, and this one no request


def test_later_turns_go_to_the_server_of_the_first_one():
    balancer = Balancer("abc")
    assert chosen(balancer, text(0, 1), text(0, 2), text(0, 3)) == "aaa"  # a common beginning
    balancer = Balancer("abc")
    first = [text(number) for number in range(3)]
    assert chosen(balancer, *first) == "abc"
    for server, prompt in zip("abc", first, strict=True):
        balancer.release(server, [*prompt, *text(9)])
    second = [[*prompt, *text(9, 4)] for prompt in first]
    assert chosen(balancer, *second[::-1]) == "cba"


def test_servers_that_were_added_and_excluded():
    balancer = Balancer("ab")
    balancer.exclude("a")
    assert chosen(balancer, text(1), text(2)) == "bb"
    balancer.exclude("b", 0.05)
    assert balancer.choose() is None
    assert balancer.choose(even_excluded=True) in "ab"
    time.sleep(0.06)
    assert balancer.choose() == "b"
    balancer.add("c")
    assert chosen(balancer, text(3)) == "c"
    balancer.include("a")
    balancer.remove("b")
    balancer.remove("c")
    balancer.release("c")
    balancer.include("c")  # has no effect, as that of a server that has left
    balancer.exclude("c")
    assert chosen(balancer, text(4)) == "a"


def test_texts_are_forgotten():
    balancer = Balancer("ab")
    assert chosen(balancer, text(1), text(2)) == "ab"
    balancer.release("a")
    balancer.release("b")
    balancer.forget_texts()
    assert chosen(balancer, text(2)) == "a"


def test_shares_stay_within_eight_requests_for_any_texts():
    draw = random.Random(0)
    balancer, unfinished = Balancer("abc"), Counter()
    for _ in range(2000):
        prompt = text(draw.randrange(3), draw.randrange(5), length=draw.randrange(1, 80))
        if draw.random() < 0.4 and unfinished.total():
            server = draw.choice(sorted(unfinished.elements()))
            balancer.release(server, prompt)
            unfinished[server] -= 1
            continue
        fewest = min(unfinished[each] for each in "abc")
        server = balancer.choose(prompt)
        assert unfinished[server] <= fewest + 8
        unfinished[server] += 1


def test_memory_of_texts_is_limited(monkeypatch):
    monkeypatch.setattr("lightning_rlhf.extras.servers.balance._KEPT_BLOCKS", 8)
    balancer = Balancer("a")
    for number in itertools.chain(range(50)):
        balancer.choose(text(number))
    assert len(balancer._blocks["a"]) == 8
