"""From a config to a trained model: the step, the loop around it, and the verbs."""
