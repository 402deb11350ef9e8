//! Timing several contestants against each other on a machine that is never quite still.
//!
//! Contestants take turns, so that a slow phase of the machine meets all of them. A turn is one
//! call, or several of a short one; before the calls of a short turn goes an unmeasured one, which
//! brings the contestant's own data back into the caches.

use std::time::{Duration, Instant};

/// The rule that ends a measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Time for each contestant, warm-up not counted.
    pub budget: Duration,
    /// The least number of measurements of each, whatever they cost.
    pub min: usize,
    /// The largest number of measurements.
    pub max: usize,
}

/// A turn lasts about this long if a call is shorter.
const TURN: Duration = Duration::from_millis(2);
/// Short calls are repeated for this long before anything is measured.
const WARM_UP: Duration = Duration::from_millis(20);

/// Times `contestants` contestants; `call(i)` runs the i-th once. Returns the seconds of each
/// measured call, in order.
pub(crate) fn interleave<E>(
    contestants: usize,
    limits: &Limits,
    call: impl FnMut(usize) -> Result<(), E>,
) -> Result<Vec<Vec<f64>>, E> {
    let start = Instant::now();
    interleave_by(contestants, limits, call, || start.elapsed())
}

fn interleave_by<E>(
    contestants: usize,
    limits: &Limits,
    mut call: impl FnMut(usize) -> Result<(), E>,
    now: impl Fn() -> Duration,
) -> Result<Vec<Vec<f64>>, E> {
    let mut timed = |i| {
        let start = now();
        call(i).map(|()| now() - start)
    };
    let mut samples = vec![Vec::new(); contestants];
    let mut spent = vec![Duration::ZERO; contestants];
    let mut latest = vec![Duration::ZERO; contestants];
    for (i, latest) in latest.iter_mut().enumerate() {
        let start = now();
        loop {
            *latest = timed(i)?;
            if now() - start >= WARM_UP {
                break;
            }
        }
    }
    loop {
        let mut active = false;
        for i in 0..contestants {
            let done = samples[i].len() >= limits.max
                || (samples[i].len() >= limits.min && spent[i] >= limits.budget);
            if done {
                continue;
            }
            active = true;
            if latest[i] < TURN {
                timed(i)?;
            }
            let mut turn = Duration::ZERO;
            while turn.is_zero() || (turn + latest[i] <= TURN && samples[i].len() < limits.max) {
                latest[i] = timed(i)?;
                // A clock too coarse to see the call must not keep the turn going for ever.
                turn += latest[i].max(Duration::from_nanos(20));
                samples[i].push(latest[i].as_secs_f64());
            }
            spent[i] += turn;
        }
        if !active {
            return Ok(samples);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};
    use std::convert::Infallible;

    /// Contestants of fixed durations on a clock of our own; returns samples and the order of
    /// calls.
    fn fake(micros: &[u64], limits: &Limits) -> (Vec<Vec<f64>>, Vec<usize>) {
        let (time, calls) = (Cell::new(Duration::ZERO), RefCell::new(Vec::new()));
        let call = |i: usize| {
            time.set(time.get() + Duration::from_micros(micros[i]));
            calls.borrow_mut().push(i);
            Ok::<_, Infallible>(())
        };
        let Ok(samples) = interleave_by(micros.len(), limits, call, || time.get());
        (samples, calls.into_inner())
    }

    #[test]
    fn slow_contestants_take_turns_and_stop_at_the_minimum() {
        let limits = Limits { budget: Duration::from_millis(100), min: 3, max: 1000 };
        let (samples, calls) = fake(&[50_000, 200_000], &limits);
        assert_eq!((samples[0].len(), samples[1].len()), (3, 3));
        assert_eq!(samples[1], [0.2; 3]);
        assert_eq!(calls, [0, 1, 0, 1, 0, 1, 0, 1]);
    }

    #[test]
    fn short_calls_share_a_turn_and_stop_at_the_budget() {
        let limits = Limits { budget: Duration::from_millis(10), min: 3, max: 1000 };
        let (samples, _) = fake(&[500, 1000], &limits);
        assert_eq!((samples[0].len(), samples[1].len()), (20, 10));
        assert!(samples[0].iter().all(|&s| (s - 500e-6).abs() < 1e-12));
    }

    #[test]
    fn iterations_bound_from_above_also_with_a_frozen_clock() {
        let limits = Limits { budget: Duration::from_secs(1), min: 7, max: 7 };
        assert_eq!(fake(&[1], &limits).0[0].len(), 7);
        let frozen = Cell::new(0);
        let call = |_| {
            frozen.set(frozen.get() + 1);
            Ok::<_, Infallible>(())
        };
        let now = || WARM_UP * u32::from(frozen.get() > 2);
        let Ok(samples) = interleave_by(1, &limits, call, now);
        assert_eq!(samples[0].len(), 7);
    }

    #[test]
    fn errors_end_it() {
        let limits = Limits { budget: Duration::ZERO, min: 1, max: 1 };
        assert_eq!(interleave(1, &limits, |_| Err("no")), Err("no"));
    }
}
