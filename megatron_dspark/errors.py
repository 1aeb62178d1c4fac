"""The one exception that is meant for the person at the keyboard."""


class DSparkError(ValueError):
    """A setting, file or combination that cannot work, said in one sentence.

    The message names what is wrong, both values, and what to do about it. It is raised before any file,
    process group or model is created, and the command line prints it without a traceback and exits with 2.
    """


class LostRankError(DSparkError):
    """Another rank of the job has ended or does not answer; every rank that is left says so, not the first alone."""
