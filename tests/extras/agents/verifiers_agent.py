"""A task of verifiers and its agent, run by the Python of a virtual environment with verifiers.

python verifiers_agent.py BASE_URL LETTER      with the key in POLICY_KEY; the reward is printed last
"""

import asyncio
import sys

import verifiers.v1 as vf
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.runtimes.subprocess import SubprocessConfig


class Letters(vf.Task):
    """Rewards the letters of the answer that are in the prompt."""

    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        """Return the fraction of letters in the prompt."""
        text = trace.last_reply or ""
        return text.count(self.data.prompt) / max(len(text), 1)


async def main(base_url, letter):
    client = EvalClientConfig(base_url=base_url, api_key_var="POLICY_KEY")
    config = AgentConfig(harness={"id": "null"}, runtime=SubprocessConfig(), model="policy", client=client, max_turns=2)
    trace = await vf.make_agent(config).run(Letters(vf.TaskData(prompt=letter)))
    if not trace.ok:
        raise SystemExit(f"the rollout failed: {trace.errors}")
    print(trace.reward)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
