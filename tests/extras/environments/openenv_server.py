"""A server of openenv with a guessing game; run by the Python of an environment that has openenv 0.10."""

import sys

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: int


class Answer(Observation):
    text: str = ""


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **arguments):
        self.number = seed % 8
        return Answer(text="guess 0..7")

    def step(self, action, timeout_s=None, **arguments):
        if action.guess > 7:
            raise RuntimeError("out of range")
        right = action.guess == self.number
        return Answer(text="" if right else "<" if self.number < action.guess else ">", reward=float(right), done=right)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    uvicorn.run(create_app(Game, Guess, Answer, max_concurrent_envs=2), port=int(sys.argv[1]), log_level="warning")
