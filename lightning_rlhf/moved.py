"""New names of modules that were moved, for the messages about configurations that have the old ones."""

from __future__ import annotations

_MOVED = {
    "lightning_rlhf.callbacks.checkpoint": "lightning_rlhf.callbacks.survival.checkpoint",
    "lightning_rlhf.callbacks.checks": "lightning_rlhf.callbacks.loop.checks",
    "lightning_rlhf.callbacks.console": "lightning_rlhf.callbacks.records.console",
    "lightning_rlhf.callbacks.engine_comparison": "lightning_rlhf.callbacks.loop.engine_comparison",
    "lightning_rlhf.callbacks.entropy_control": "lightning_rlhf.extras.algorithms.entropy_control",
    "lightning_rlhf.callbacks.graceful_shutdown": "lightning_rlhf.callbacks.survival.graceful_shutdown",
    "lightning_rlhf.callbacks.health": "lightning_rlhf.callbacks.records.health",
    "lightning_rlhf.callbacks.held_out": "lightning_rlhf.callbacks.records.held_out",
    "lightning_rlhf.callbacks.hf_export": "lightning_rlhf.callbacks.survival.hf_export",
    "lightning_rlhf.callbacks.kl_control": "lightning_rlhf.extras.algorithms.kl_control",
    "lightning_rlhf.callbacks.loop.entropy_control": "lightning_rlhf.extras.algorithms.entropy_control",
    "lightning_rlhf.callbacks.loop.kl_control": "lightning_rlhf.extras.algorithms.kl_control",
    "lightning_rlhf.callbacks.metrics_csv": "lightning_rlhf.callbacks.records.metrics_csv",
    "lightning_rlhf.callbacks.policy_check": "lightning_rlhf.callbacks.loop.policy_check",
    "lightning_rlhf.callbacks.report": "lightning_rlhf.extras.report.summary",
    "lightning_rlhf.callbacks.report_page": "lightning_rlhf.extras.report.page_callback",
    "lightning_rlhf.callbacks.rollout_images": "lightning_rlhf.callbacks.records.rollout_images",
    "lightning_rlhf.callbacks.rollout_log": "lightning_rlhf.callbacks.records.rollout_log",
    "lightning_rlhf.callbacks.rollout_loop": "lightning_rlhf.callbacks.loop.rollout_loop",
    "lightning_rlhf.callbacks.rollout_parts": "lightning_rlhf.callbacks.loop.rollout_parts",
    "lightning_rlhf.callbacks.rollout_rows": "lightning_rlhf.callbacks.loop.rollout_rows",
    "lightning_rlhf.callbacks.rollout_settings": "lightning_rlhf.callbacks.loop.rollout_settings",
    "lightning_rlhf.callbacks.rollout_validation": "lightning_rlhf.callbacks.loop.rollout_validation",
    "lightning_rlhf.callbacks.run_engine": "lightning_rlhf.callbacks.loop.run_engine",
    "lightning_rlhf.callbacks.run_settings": "lightning_rlhf.callbacks.survival.run_settings",
    "lightning_rlhf.callbacks.run_state": "lightning_rlhf.callbacks.survival.run_state",
    "lightning_rlhf.callbacks.step_metrics": "lightning_rlhf.callbacks.loop.step_metrics",
    "lightning_rlhf.callbacks.throughput": "lightning_rlhf.callbacks.records.throughput",
    "lightning_rlhf.callbacks.validation": "lightning_rlhf.callbacks.loop.validation",
    "lightning_rlhf.calls.balance": "lightning_rlhf.extras.servers.balance",
    "lightning_rlhf.data.addition": "lightning_rlhf.tasks.addition",
    "lightning_rlhf.data.drawings": "lightning_rlhf.tasks.drawings",
    "lightning_rlhf.data.programming": "lightning_rlhf.tasks.programming",
    "lightning_rlhf.environments.adapters": "lightning_rlhf.extras.environments",
    "lightning_rlhf.environments.python_tool": "lightning_rlhf.extras.sandbox.python_tool",
    "lightning_rlhf.environments.renderers_bridge": "lightning_rlhf.extras.environments.renderers_bridge",
    "lightning_rlhf.environments.tasks.calculator": "lightning_rlhf.tasks.calculator",
    "lightning_rlhf.environments.tasks.guessing": "lightning_rlhf.tasks.guessing",
    "lightning_rlhf.environments.tasks.lookup": "lightning_rlhf.tasks.lookup",
    "lightning_rlhf.environments.tools": "lightning_rlhf.extras.environments.tools",
    "lightning_rlhf.environments.vllm_parser": "lightning_rlhf.extras.environments.vllm_parser",
    "lightning_rlhf.modules.distillation": "lightning_rlhf.extras.algorithms.distillation",
    "lightning_rlhf.modules.echo": "lightning_rlhf.extras.algorithms.echo",
    "lightning_rlhf.modules.kto": "lightning_rlhf.extras.algorithms.kto",
    "lightning_rlhf.modules.mixture": "lightning_rlhf.extras.algorithms.mixture",
    "lightning_rlhf.modules.remote_teachers": "lightning_rlhf.extras.algorithms.remote_teachers",
    "lightning_rlhf.modules.response_pairs": "lightning_rlhf.extras.algorithms.response_pairs",
    "lightning_rlhf.objectives.covariance_policy_losses": "lightning_rlhf.extras.algorithms.covariance_policy_losses",
    "lightning_rlhf.report.check_states": "lightning_rlhf.extras.report.check_states",
    "lightning_rlhf.report.definitions": "lightning_rlhf.extras.report.definitions",
    "lightning_rlhf.report.health": "lightning_rlhf.callbacks.records.health_monitor",
    "lightning_rlhf.report.page": "lightning_rlhf.extras.report.page",
    "lightning_rlhf.report.run_directory": "lightning_rlhf.extras.report.run_directory",
    "lightning_rlhf.report.run_history": "lightning_rlhf.callbacks.records.run_history",
    "lightning_rlhf.report.values": "lightning_rlhf.callbacks.records.values",
    "lightning_rlhf.rewards.code": "lightning_rlhf.extras.sandbox.code",
    "lightning_rlhf.rewards.endpoint": "lightning_rlhf.extras.judges.endpoint",
    "lightning_rlhf.rewards.judge": "lightning_rlhf.extras.judges.judge",
    "lightning_rlhf.rewards.math": "lightning_rlhf.extras.rewards.math",
    "lightning_rlhf.rewards.math_worker": "lightning_rlhf.extras.rewards.math_worker",
    "lightning_rlhf.rewards.remote": "lightning_rlhf.extras.judges.remote",
    "lightning_rlhf.rewards.rules": "lightning_rlhf.extras.rewards.rules",
    "lightning_rlhf.rewards.sandbox": "lightning_rlhf.extras.sandbox",
    "lightning_rlhf.rewards.sources": "lightning_rlhf.extras.rewards.sources",
    "lightning_rlhf.rewards.text": "lightning_rlhf.extras.rewards.text",
    "lightning_rlhf.rollout.agents": "lightning_rlhf.extras.agents.loop",
    "lightning_rlhf.rollout.endpoint": "lightning_rlhf.extras.agents.endpoint",
    "lightning_rlhf.rollout.preview": "lightning_rlhf.extras.commands.preview",
    "lightning_rlhf.rollout.vllm.server": "lightning_rlhf.extras.servers",
    "lightning_rlhf.teachers.server": "lightning_rlhf.extras.judges.teacher_server",
    "lightning_rlhf.tools.commands": "lightning_rlhf.extras.commands",
    "lightning_rlhf.tools.commands.doctor": "lightning_rlhf.extras.doctor.command",
    "lightning_rlhf.tools.commands.doctor_links": "lightning_rlhf.extras.doctor.links",
    "lightning_rlhf.tools.commands.doctor_try": "lightning_rlhf.extras.doctor.trial",
    "lightning_rlhf.tools.commands.inspect": "lightning_rlhf.extras.report.inspect",
    "lightning_rlhf.tools.commands.plan": "lightning_rlhf.extras.plan.command",
    "lightning_rlhf.tools.commands.report": "lightning_rlhf.extras.report.command",
    "lightning_rlhf.tools.commands.serve": "lightning_rlhf.extras.serve.command",
    "lightning_rlhf.tools.inspector": "lightning_rlhf.extras.report.inspector",
    "lightning_rlhf.tools.planning": "lightning_rlhf.extras.plan",
    "lightning_rlhf.tools.serving": "lightning_rlhf.extras.serve",
}


def new_name(path: str) -> str | None:
    """Return the name that a moved class, function or module has now; None if it was not moved.

    Args:
        path: dotted name, or the reference ``module:function`` of a function.
    """
    module = path.partition(":")[0]
    while module:
        if module in _MOVED:
            return _MOVED[module] + path[len(module) :]
        module = module.rpartition(".")[0]
    return None
