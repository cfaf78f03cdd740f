// SPDX-License-Identifier: Apache-2.0

//go:build !race

package engines

// longest is the longest message there is.
const longest = 2 << 30

// raceDetector says whether it is in use.
const raceDetector = false
