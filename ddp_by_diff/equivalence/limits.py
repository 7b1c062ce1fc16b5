"""Thresholds of all files here, each with its reason.  Nearly all are relative."""

EPS = 2**-23  # the last digit of float32, relative to the number

# Check 1: how far each tensor that the optimizer got is from the mean of the ranks' own gradients.
AVERAGED = 2e-6  # float32: a sum of so few numbers, divided before or after
AVERAGED_COARSE = 1e-2  # gradients in bfloat16 or float16: their last digit is up to 8e-3
FACTOR = 2e-3  # a factor of a rank's gradient that is nearer to 0 or 1 counts as 0 or 1

# Check 2: how far each tensor of the gradient of one batch is from the mean of the ranks' own.
ROUNDING = 4 * EPS  # times the root of the number of examples
YARDSTICKS = 10  # a measured rounding may be small by chance: up to 10 times as much is rounding
MOST = 1e-3  # no larger difference is rounding, whatever was measured
MOST_COARSE = 1e-2  # layers that compute in bfloat16 or float16
SMALL = 1e-3  # a smaller tensor is compared with this part of the whole gradient
SMALL_COARSE = 1.0  # in bfloat16 or float16, where a small tensor is mostly rounding
CLEARLY = 10  # other factors explain a difference, if they leave a tenth of it or less
EQUAL = 1e-4  # gradients computed twice, from the same examples, are nearer than this

# Check 3: the change of each weight.
UPDATED = 1e-5  # the gradients are equal, but an optimizer may add up numbers in another order
DIGITS = 2  # a weight may differ by this many units in its last digit
SCHEDULE = 1e-2  # a learning rate, in a few steps, if an epoch has another number of steps

COPIES = 4 * EPS  # so far apart are sums that each rank makes itself
SEEN = 5e-2  # THE SAME is said only if each check would notice a difference as large as this
COARSE = 1e-4  # a number format with a larger last digit is coarse
ALIKE = 0.05  # this part of the examples that a program draws may be alike by chance
OFTEN = 0.2  # more than this part of the examples on two ranks, in each step, is no chance
GROUPS = 3  # a tensor of up to 3 numbers that count up may hold labels, not numbers of groups
AHEAD = 4  # steps whose batches a loader may have read in advance
