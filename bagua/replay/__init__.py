"""The commands `bagua bench`: profiles of models, which hold a step's costs layer by layer, and their replay."""
