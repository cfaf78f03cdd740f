// SPDX-License-Identifier: Apache-2.0

//go:build !race

package provider_test

// raceDetector says whether it is in use.
const raceDetector = false
