"""Attributes and settings as they were when training began: only what has changed since is saved."""

import lightning as L

from hpc.state import attributes, trainer_settings


class InitialValues:
    """Fingerprints of attributes and settings, recorded at the start of a fit.

    Attributes:
        attributes: of the module, its data and its callbacks; None: training has not begun.
        settings: of the Trainer and the optimizers.
    """

    def __init__(self) -> None:
        self.attributes: attributes.InitialAttributes | None = None
        self.settings: trainer_settings.InitialSettings = {}
        self._at_fit_start: attributes.InitialAttributes | None = None  # before the hooks of the fit
        self._before_sanity_check: attributes.InitialAttributes = {}
        # A resumed run makes no sanity check, so what that check has changed must be saved.
        self._changed_by_sanity_check: set[attributes.Place] = set()
        self.named_unsaved: set[str] = set()  # attributes that a checkpoint cannot hold, and of which a warning says so

    def record_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._at_fit_start = attributes.record_initial(trainer, module)

    def record_sanity_check_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._before_sanity_check = attributes.record_initial(trainer, module)

    def record_sanity_check_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        now, before = attributes.record_initial(trainer, module), self._before_sanity_check
        self._changed_by_sanity_check = {place for place in now if now[place] != before.get(place)}

    def record_training_start(
        self, trainer: L.Trainer, module: L.LightningModule, *, before_restored: attributes.InitialAttributes
    ) -> None:
        """Record once, after the module's own `on_train_start`, which may depend on how long this training is.

        Args:
            before_restored: fingerprints of attributes that were restored already, as they were before.
        """
        if self.attributes is not None:
            return
        now = attributes.record_initial(trainer, module, before=self._at_fit_start)
        places = now.keys() - self._changed_by_sanity_check
        self.attributes = {place: now[place] for place in places} | before_restored
        self.settings = trainer_settings.record_initial(trainer)
