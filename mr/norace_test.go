// SPDX-License-Identifier: Apache-2.0

//go:build !race

package mr

// raceDetector says whether it is in use.
const raceDetector = false
