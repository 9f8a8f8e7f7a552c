"""Temporary."""


class ReplicaCheck:
    @classmethod
    def of(cls, model, optimizers, group, setting):
        return None

    @staticmethod
    def run_now(model, optimizers, group):
        pass
