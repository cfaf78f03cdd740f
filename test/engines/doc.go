// SPDX-License-Identifier: Apache-2.0

// Package engines tests two whole engines against each other: all operations
// mixed, over links that lose, duplicate, reorder and corrupt frames, with a model
// that knows every byte; the same over real TAPs in two processes; and memory that
// changes under the engines while they use it.
//
// A plan (plan_test.go) is made from a seed: the work requests of both sides, the
// completions they must give, and the memory of both sides before and after.
// Nothing of it depends on addresses or keys, so two processes with the same seed
// have the same plan. A side (side_test.go) carries out its half of a plan.
package engines
