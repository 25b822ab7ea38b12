"""The arithmetic of an update: rule, formats, rounding, norm and kernels. Knows no link."""
