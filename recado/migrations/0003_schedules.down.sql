DROP TABLE {schema}.schedule_holders;
DROP TABLE {schema}.schedules;
