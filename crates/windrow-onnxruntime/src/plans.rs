//! Plans of a node, by what they compute.

use crate::operator::Outcome;
use std::sync::{Arc, Mutex, PoisonError};
use windrow::PlanOptions;

/// Plans of earlier runs: making one costs more than running it on a small tensor. A node meets few shapes; where a
/// model's lengths change with every run, the oldest plans are dropped.
#[derive(Debug)]
pub(crate) struct Plans<S, P>(Mutex<Vec<(S, Arc<P>)>>);

const CAPACITY: usize = 16;

impl<S: PartialEq, P> Plans<S, P> {
    pub(crate) fn new() -> Self {
        Plans(Mutex::new(Vec::new()))
    }

    pub(crate) fn get(
        &self,
        spec: S,
        make: impl FnOnce(&S, &PlanOptions) -> windrow::Result<P>,
    ) -> Outcome<Arc<P>> {
        if let Some((_, plan)) = self.lock().iter().find(|(known, _)| *known == spec) {
            return Ok(plan.clone());
        }
        // Not under the mutex: threads that miss the same plan at once make two.
        let plan = Arc::new(make(&spec, &PlanOptions::default())?);
        let mut plans = self.lock();
        if plans.len() == CAPACITY {
            plans.remove(0);
        }
        plans.push((spec, plan.clone()));
        Ok(plan)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<(S, Arc<P>)>> {
        // The list is whole between any two statements that change it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
