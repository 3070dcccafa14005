"""One module per command. ``run(arguments)`` receives the arguments after the command and returns an exit code."""

LIGHTNING = "lightning_rlhf.cli.main"
# Commands in the order of use: (module, description) by name. A module is imported when its command runs, and has a
# function run(arguments) that returns the exit code. LightningCLI reads sys.argv itself, and warns of arguments.
COMMANDS = {
    "new": (f"{__name__}.new", "write a small project to begin with"),
    "doctor": (f"{__name__}.doctor", "check this machine and its installation"),
    "data": (f"{__name__}.data_check", "data check: check and describe the data of a run"),
    "plan": (f"{__name__}.plan", "estimate the memory of a run on a number of GPUs, without a GPU"),
    "fit": (LIGHTNING, "train: lightning-rlhf fit --config configs/quickstart/ppo.yaml"),
    "validate": (LIGHTNING, "evaluate a checkpoint on the validation data"),
    "test": (LIGHTNING, "run a module's own test loop"),
    "predict": (LIGHTNING, "run a module's own predict loop"),
    "export": (f"{__name__}.export", "write a checkpoint as a directory that transformers and vLLM load"),
    "generate": (f"{__name__}.generate", "generate responses of a model or a server to a file of prompts"),
    "evaluate": (f"{__name__}.evaluate", "score a file of responses, with confidence intervals"),
    "inspect": (f"{__name__}.inspect", "serve a page about runs, with a viewer of their responses"),
    "report": (f"{__name__}.report", "write a page with curves, health checks and responses of runs"),
    "serve": (f"{__name__}.serve", "start vLLM's OpenAI server with an API key and limits"),
    "completion": (f"{__name__}.completion", "print a script that completes commands and options in a shell"),
}
