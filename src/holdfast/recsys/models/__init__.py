"""Click models: DLRM, DeepFM and PNN, in the sizes of the papers."""
