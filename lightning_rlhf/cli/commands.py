"""Table of the commands."""

LIGHTNING = "lightning_rlhf.cli.main"
_TOOLS = "lightning_rlhf.tools.commands"
# Commands in the order of use: (module, description) by name. A module is imported when its command runs, and has a
# function run(arguments) that returns the exit code. LightningCLI reads sys.argv itself, and warns of arguments.
COMMANDS = {
    "new": (f"{_TOOLS}.new", "write a small project to begin with"),
    "doctor": (f"{_TOOLS}.doctor", "check this machine and its installation"),
    "data": (f"{_TOOLS}.data_check", "data check: check and describe the data of a run"),
    "plan": (f"{_TOOLS}.plan", "estimate the memory of a run on a number of GPUs, without a GPU"),
    "fit": (LIGHTNING, "train: lightning-rlhf fit --config configs/quickstart/ppo.yaml"),
    "validate": (LIGHTNING, "evaluate a checkpoint on the validation data"),
    "test": (LIGHTNING, "run a module's own test loop"),
    "predict": (LIGHTNING, "run a module's own predict loop"),
    "export": (f"{_TOOLS}.export", "write a checkpoint as a directory that transformers and vLLM load"),
    "generate": (f"{_TOOLS}.generate", "generate responses of a model or a server to a file of prompts"),
    "evaluate": (f"{_TOOLS}.evaluate", "score a file of responses, with confidence intervals"),
    "inspect": (f"{_TOOLS}.inspect", "serve a page about runs, with a viewer of their responses"),
    "report": (f"{_TOOLS}.report", "write a page with curves, health checks and responses of runs"),
    "serve": (f"{_TOOLS}.serve", "start vLLM's OpenAI server with an API key and limits"),
    "completion": (f"{_TOOLS}.completion", "print a script that completes commands and options in a shell"),
}
