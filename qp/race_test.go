// SPDX-License-Identifier: Apache-2.0

//go:build race

package qp

// raceDetector says whether the race detector runs, under which all is slower.
const raceDetector = true
