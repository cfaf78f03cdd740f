// SPDX-License-Identifier: Apache-2.0

//go:build race

package mr

// raceDetector says whether it is in use: a fork(2) then takes a second, for what it keeps of all memory.
const raceDetector = true
